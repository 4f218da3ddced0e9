"""torchrun on two hosts: network namespaces of this machine, connected by a veth pair.

Each has a loopback and one address of its own. They share nothing but memory, which the host NCCL
needs and gloo does not. Skipped where network namespaces cannot be created.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.transport.nccl.faults import LACKS_HOST_NCCL

pytestmark = pytest.mark.process

PORT, SECONDS = 29471, 600.0  # the port is free in new namespaces; only a hang takes as long
NAMES = [f"ringdp{os.getpid()}{host}" for host in "ab"]
CABLES = [f"rdp{os.getpid() % 10**7}{host}" for host in "ab"]  # at most 15 characters
ADDRESSES = ["10.97.31.1", "10.97.31.2"]

SCRIPT = """
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
print("rank", comm.rank, "in", os.stat("/proc/self/ns/net").st_ino, "ends")
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip")
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", CABLES[0], "type", "veth", "peer", "name", CABLES[1])
        for name, cable, address in zip(NAMES, CABLES, ADDRESSES, strict=True):
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            for device in (cable, "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield NAMES
    except subprocess.CalledProcessError as e:
        pytest.skip(f"network namespaces may not be made here: {e.stderr.decode().strip()}")
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_torchrun_on_two_hosts(hosts: list[str], tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    transports = ["c10d"]
    if not LACKS_HOST_NCCL:
        transports.append("nccl-host")
    nodes, outputs = [], [tmp_path / name for name in hosts]
    for node, (name, cable) in enumerate(zip(hosts, CABLES, strict=True)):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        torchrun += ["--nproc-per-node=1", f"--node-rank={node}"]
        torchrun += [f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}"]
        torchrun += [f"--log-dir={tmp_path}"]  # torchrun does not remove its own
        with outputs[node].open("w", encoding="utf-8") as output:
            nodes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, *torchrun, str(script), *transports],
                    env=os.environ
                    | {
                        "GLOO_SOCKET_IFNAME": cable,
                        "OMP_NUM_THREADS": "1",
                        "PYTHONFAULTHANDLER": "1",
                    },
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    try:
        until = time.monotonic() + SECONDS
        while any(node.poll() is None for node in nodes) and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        late = [name for name, node in zip(hosts, nodes, strict=True) if node.poll() is None]
        for name in late:  # SIGABRT makes hanging processes print where they are
            running = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, encoding="utf-8"
            )
            for pid in reversed(running.stdout.split()):
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGABRT)
        for node in nodes:
            node.wait(SECONDS)
    printed = [output.read_text(encoding="utf-8") for output in outputs]
    assert not late, "\n".join(printed)
    ended = [
        line.split() for text in printed for line in text.splitlines() if line.endswith("ends")
    ]
    assert sorted(words[1] for words in ended) == ["0", "1"], "\n".join(printed)
    assert len({words[3] for words in ended}) == 2, "the ranks are in different network namespaces"
