"""How ranks find each other: under torchrun, and where its variables are wrong."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

import ringdp
from ringdp.cli.loopback import loopback_store
from ringdp.comm import rendezvous

pytestmark = pytest.mark.process

TORCHRUN = """
import sys, torch, ringdp
comm = ringdp.init(timeout=120)
x = torch.tensor([float(comm.rank + 1)])
comm.all_reduce(x)
sys.stdout.write(f"rank {comm.rank} of {comm.size}: {x.item()}\\n")  # whole lines, unbuffered too
"""


def test_init_under_torchrun(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(TORCHRUN)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node=2", str(script)),
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2: 3.0", "rank 1 of 2: 3.0"]


def listening() -> set[str]:
    """The addresses, in hexadecimal, on which this process accepts connections."""
    links = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # other threads close theirs
            links.add(os.readlink(link))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in links:
                found.add(address)
    return found


@pytest.mark.parametrize("serve", ["init", "launcher"])
def test_our_stores_listen_on_the_loopback_alone(serve):
    before = listening()
    if serve == "init":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        store = rendezvous._serve(rendezvous._Place(0, 1, "127.0.0.1", port), timedelta(seconds=5))
        again = rendezvous._serve(rendezvous._Place(0, 1, "127.0.0.1", port), timedelta(seconds=5))
        again.set("one server", "for both")
        assert store.get("one server") == b"for both"
    else:
        store = loopback_store()
    (address,) = listening() - before
    assert address == f"0100007F:{store.port:04X}"


def test_a_store_that_nobody_serves_is_a_communication_error(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (variables | {"MASTER_PORT": str(port)}).items():
        monkeypatch.setenv(name, value)
    where = f"rank 1 cannot reach rank 0's store at 127.0.0.1:{port}"
    with pytest.raises(ringdp.CommunicationError, match=where):
        ringdp.init(timeout=0.5)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RANK", "first", "RANK is 'first'; allowed: a whole number"),
        ("RANK", "-1", "RANK is '-1'; allowed: a whole number"),
        ("RANK", "2", "RANK is 2; WORLD_SIZE is 2"),
        ("WORLD_SIZE", "2.0", "WORLD_SIZE is '2.0'; allowed: a whole number"),
        ("MASTER_PORT", "http", "MASTER_PORT is 'http'; allowed: a whole number"),
        ("MASTER_PORT", "65536", "MASTER_PORT is 65536; allowed: 0..65535"),
    ],
)
def test_variables_that_torchrun_does_not_set_so_are_refused(monkeypatch, name, value, said):
    good = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for variable, given in (good | {name: value}).items():
        monkeypatch.setenv(variable, given)
    with pytest.raises(ringdp.UsageError, match=re.escape(said)):
        ringdp.init()


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_torchruns_variables_in_part_are_refused(monkeypatch, missing):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(ringdp.UsageError, match=missing):
        ringdp.init()
