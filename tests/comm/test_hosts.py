"""torchrun on two hosts: namespaces of this machine. Skipped where they cannot be made."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.hosts import Host, finish, torchrun, two_hosts
from tests.transport.device_bodies import from_pieces, in_replicas
from tests.transport.nccl.faults import LACKS_HOST_NCCL

pytestmark = pytest.mark.process

ROOT, SECONDS = Path(__file__).parents[2], 600.0  # only a hang takes as long

TRANSPORTS = """
import os, sys
import torch
import ringdp

for transport in sys.argv[1:]:
    with ringdp.init(transport=transport, timeout=180.0) as comm:
        x = torch.arange(1003.0) * (comm.rank + 1)
        comm.all_reduce(x)
        assert torch.equal(x, torch.arange(1003.0) * 3), transport
        comm.send(x, 1) if comm.rank == 0 else comm.recv(x.zero_(), 0)
        assert torch.equal(x, torch.arange(1003.0) * 3), transport
        comm.barrier()
print(f"found {comm.rank} {os.stat('/proc/self/ns/net').st_ino}\\n", end="")  # in one write
"""
ON_A_HOST = """
import json
import ringdp
from tests.transport.device_bodies import from_pieces, in_replicas

comm = ringdp.init(transport="c10d", timeout=180.0)
parts = comm.split(comm.rank // 2), comm.split(comm.rank % 2), comm.duplicate()
kinds = [type(part._transport).__name__ for part in parts]
losses = in_replicas(comm).losses, from_pieces(comm).losses
print(f"found {comm.rank} {json.dumps([kinds, *losses])}\\n", end="")
"""


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    try:
        with two_hosts() as made:
            yield made
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"hosts cannot be made here: {getattr(e, 'stderr', None) or e}")


def found(
    hosts: list[Host], at: Path, ranks: int, script: str, *arguments: str, **options: bool
) -> list[str]:
    """What each rank of a script has found, in order."""
    path = at / "train.py"
    path.write_text(f"import sys\nsys.path.append({str(ROOT)!r})\n{script}", encoding="utf-8")
    outputs, nodes = [at / host.name for host in hosts], []
    for host, output in zip(hosts, outputs, strict=True):
        with output.open("w", encoding="utf-8") as to:
            nodes.append(torchrun(host, ranks, [str(path), *arguments], at, to, **options))
    late = finish(nodes, SECONDS)
    printed = "\n".join(output.read_text(encoding="utf-8") for output in outputs)
    assert not late, printed
    lines = [line.split(" ", 2) for line in printed.splitlines() if line.startswith("found ")]
    assert sorted(int(rank) for _, rank, _ in lines) == [*range(2 * ranks)], printed
    return [what for _, _, what in sorted(lines)]


def test_transports_between_hosts(hosts: list[Host], tmp_path: Path) -> None:
    transports = ["c10d"] if LACKS_HOST_NCCL else ["c10d", "nccl-host"]
    # the host NCCL opens memory of other processes, which it must see
    networks = found(hosts, tmp_path, 1, TRANSPORTS, *transports, sees_others=True)
    assert len({*networks}) == 2, "the ranks are in different network namespaces"


def test_ranks_of_one_host_share_memory_in_a_job_over_gloo(
    hosts: list[Host], tmp_path: Path, ranks: Any
) -> None:
    """Those that are split off. Each host holds a replica, or all of a unit for its backward, with
    the bits of one host's ranks."""
    replicas, pieces = ranks(4)(in_replicas), ranks(4)(from_pieces)
    kinds = ["ShmTransport", "C10dTransport", "C10dTransport"]
    for rank, each in enumerate(found(hosts, tmp_path, 2, ON_A_HOST)):
        assert json.loads(each) == [kinds, replicas[rank].losses, pieces[rank].losses]
