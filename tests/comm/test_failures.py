"""A rank that dies, closes, is late or mistaken: an error on every other; and nothing stays."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed import TCPStore

import ringdp
from ringdp import CommunicationError, Communicator

pytestmark = pytest.mark.process

LARGE = 20_000_000  # elements: a collective of tens of milliseconds


class Heard(NamedTuple):
    error: str
    text: str
    seconds: float
    again: str  # the error of the next call


def hear(comm: Communicator, *calls: Any) -> Heard | None:
    start = time.monotonic()
    try:
        for call in calls:
            call()
    except CommunicationError as e:
        seconds = time.monotonic() - start
        with pytest.raises(CommunicationError) as again:
            comm.barrier()
        return Heard(type(e).__name__, str(e), seconds, type(again.value).__name__)
    return None


def die(after: float = 0.0) -> None:
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGKILL)


def killed(comm: Communicator, when: str) -> Heard | None:
    comm.barrier()
    x = torch.ones(LARGE)
    if comm.rank == 1:
        if when == "before":
            die()
        if when == "within":
            threading.Thread(target=die, args=(0.02,)).start()
        comm.all_reduce(x)
        die()
    return hear(comm, lambda: comm.all_reduce(x), comm.barrier)


@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_a_killed_rank_is_named_on_every_other(fresh_ranks, when):
    heard = fresh_ranks(3).outcomes(killed, when)
    assert heard[1] is None
    for rank in (0, 2):
        assert heard[rank].error == heard[rank].again == "PeerLost"
        assert "rank 1 has ended" in heard[rank].text
        assert heard[rank].seconds < 2.0


def fallible(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives it a duplicate to ruin, and checks that its end leaves no memory and no descriptor."""

    @wraps(function)
    def run(comm: Communicator, *arguments: Any) -> Any:
        before = held()
        other = comm.duplicate()
        other.barrier()  # collective 0
        try:
            return function(other, *arguments)
        finally:
            other.close()
            del other
            assert held() == before
            comm.barrier()

    return run


def held() -> tuple[int, int]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return maps.count("memfd:ringdp"), len(os.listdir("/proc/self/fd"))


@fallible
def closes(comm: Communicator) -> Heard | None:
    if comm.rank == 1:
        comm.close()
        comm.close()
        with pytest.raises(CommunicationError, match="closed"):
            comm.barrier()
        return None
    return hear(comm, comm.barrier)


def test_a_rank_that_closes_is_lost_to_the_others(ranks):
    for heard in ranks(3)(closes):
        if heard:
            assert heard.error == heard.again == "PeerLost"
            assert "rank 1 has ended" in heard.text
            assert heard.seconds < 2.0


@fallible
def late(comm: Communicator, issues: str) -> Heard | None:
    x = torch.ones(1000)
    if comm.rank == 1:
        time.sleep(0.7)
    last = comm.broadcast if issues == "broadcast" else comm.all_reduce
    heard = hear(comm, lambda: last(x, async_op=True, tag=5).wait(0.3), comm.barrier)
    time.sleep(0.7)  # a rank that leaves now would be lost to the late one
    return heard


@pytest.mark.parametrize("issues", ["all_reduce", "broadcast"])
def test_a_late_rank_is_a_timeout_on_all(ranks, issues):
    for rank, h in enumerate(ranks(3)(late, issues)):
        assert h.error == h.again == "CollectiveTimeout", h
        assert h.seconds < 1.0
        behind = "rank 1 has not called #1" in h.text or "rank 1 (this rank) has not" in h.text
        if rank == 2 or issues == "all_reduce":  # the broadcast's root waits for nobody
            assert behind, h.text
            assert f"rank {rank} waited for {issues} #1 (float32, " in h.text
            assert " of 1000 elements, tag 5, at " in h.text


HERE = __file__
LINES = Path(__file__).read_text().splitlines()
CALLS = {
    "nothing": lambda c, x: c.all_reduce(x),
    "collective": lambda c, x: c.broadcast(x),
    "dtype": lambda c, x: c.all_reduce(x.int()),
    "op": lambda c, x: c.all_reduce(x, "max"),
    "length": lambda c, x: c.all_reduce(x[:-1]),
    "tag": lambda c, x: c.all_reduce(x, tag=7),
    "average": lambda c, x: c.all_reduce(x, "avg"),
}
SHOWN = {
    "collective": "rank 1: broadcast #1 (float32, root 0) of 100 elements, tag 0, at ",
    "dtype": "rank 1: all_reduce #1 (int32, sum) of 100 elements, tag 0, at ",
    "op": "rank 1: all_reduce #1 (float32, max) of 100 elements, tag 0, at ",
    "length": "rank 1: all_reduce #1 (float32, sum) of 99 elements, tag 0, at ",
    "tag": "rank 1: all_reduce #1 (float32, sum) of 100 elements, tag 7, at ",
    "average": "rank 1: all_reduce #1 (float32, avg) of 100 elements, tag 0, at ",
}


@fallible
def mistaken(comm: Communicator, what: str) -> Heard | None:
    x = torch.ones(100)
    if comm.rank == 1:
        return hear(comm, lambda: CALLS[what](comm, x), comm.barrier)
    return hear(comm, lambda: CALLS["nothing"](comm, x), comm.barrier)


@pytest.mark.parametrize("what", SHOWN)
def test_a_mismatch_shows_both_calls_to_all(ranks, what):
    for h in ranks(3)(mistaken, what):
        assert h.error == h.again == "CollectiveMismatch", h
        assert ": all_reduce #1 (float32, sum) of 100 elements, tag 0, at " in h.text
        assert SHOWN[what] in h.text
        places = re.findall(r"^  rank \d: .* at (.*):(\d+)$", h.text, re.M)
        assert [(f, LINES[int(line) - 1].count("lambda c, x: ")) for f, line in places] == [
            (HERE, 1)
        ] * 2


@fallible
def other_roots(comm: Communicator) -> Heard | None:
    """Every rank waits for another one: no message tells them that they disagree."""
    root = (comm.rank + 1) % comm.size
    return hear(comm, lambda: comm.broadcast(torch.ones(100), root))


def test_different_roots_are_a_mismatch_and_not_a_timeout(ranks):
    for h in ranks(3)(other_roots):
        assert h.error == h.again == "CollectiveMismatch", h
        assert len(set(re.findall(r"^  rank \d: broadcast .*(root \d)\)", h.text, re.M))) == 2


@fallible
def pending_close(comm: Communicator) -> float:
    start = time.monotonic()
    if comm.rank == 0:
        works = [comm.all_reduce(torch.ones(10), async_op=True) for _ in range(3)]
        comm.close()
        for work in works:  # the first runs, the others wait in line: neither may wait on
            with pytest.raises(CommunicationError, match="closed"):
                work.wait()
            assert work.is_completed()
            assert isinstance(work.exception(), CommunicationError)
    return time.monotonic() - start


def test_close_ends_what_is_pending(ranks):
    assert max(ranks(2)(pending_close)) < 2.0


@fallible
def buffers_outlive_errors(comm: Communicator) -> None:
    """The tensor of a collective that timed out is not reused while the thread may write to it."""
    if comm.rank == 1:
        time.sleep(0.3)
    for _ in range(20):
        with pytest.raises(CommunicationError):
            comm.all_reduce(torch.ones(100_000), async_op=True).wait(timeout=0.001)
        x = torch.full((100_000,), 3.0)
        time.sleep(0.001)
        assert torch.all(x == 3.0)


def test_a_timed_out_buffer_is_not_freed_under_the_thread(ranks):
    ranks(2)(buffers_outlive_errors)


@fallible
def interrupted(comm: Communicator) -> float:
    if comm.rank == 1:
        time.sleep(1.5)
        return 0.0
    # A job in the background of a shell without job control starts with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        comm.barrier()
    return time.monotonic() - start


def test_ctrl_c_ends_a_wait(ranks):
    assert ranks(2)(interrupted)[0] < 0.8


@fallible
def forked(comm: Communicator) -> tuple[int, bool]:
    """A child, as of a data loader: it is refused, and its exit harms nobody. It has the arena,
    where tensors of its own may lie, but not the segment that ranks talk through."""
    pid = os.fork()
    if pid == 0:
        maps = Path("/proc/self/maps").read_text()
        try:
            comm.barrier()
        except ringdp.UsageError:
            comm.close()
            os._exit(int("memfd:ringdp " in maps))
        os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    comm.barrier()
    return status, "memfd:ringdp " in Path("/proc/self/maps").read_text()


def test_a_forked_child_is_no_rank(ranks):
    assert ranks(2)(forked) == [(0, True)] * 2


# Forks the ranks of one job after the other: torch is imported once.
HOST = """
import json, os, sys, time, signal, torch, ringdp
torch.set_num_threads(1)
size, scripts = int(sys.argv[1]), json.loads(sys.argv[2])  # [(port, script)]
os.environ |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}

def job(port, script):
    os.environ["MASTER_PORT"] = str(port)
    ranks = {}
    for rank in range(size):
        if not (pid := os.fork()):
            os.environ["RANK"] = str(rank)
            comm = ringdp.init(timeout=20)
            exec(script, {**globals(), "comm": comm, "rank": rank})
            sys.exit()
        ranks[pid] = rank
    codes, deadline = ["hangs"] * size, time.monotonic() + 10
    while ranks and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return codes

codes = [job(*s) for s in scripts]
print(json.dumps(codes))
"""

ENDS = {
    # The last collective's result is still being read by the others when a rank goes.
    "x = torch.ones(2_000_000)\nfor _ in range(3): comm.all_reduce(x)": [0, 0, 0],
    "x = torch.ones(9)\nif rank == 0: w = comm.all_reduce(x, async_op=True); time.sleep(0.1)": [0]
    * 3,
    "a = []; a.append((a, comm.duplicate(), comm.duplicate())); comm.barrier()": [0, 0, 0],
    "comm.barrier(); sys.exit(3)": [3, 3, 3],
    "comm.barrier(); os.kill(os.getpid(), signal.SIGKILL)": [-9, -9, -9],
    "comm.barrier()\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
    "try: comm.barrier()\nexcept ringdp.PeerLost: sys.exit(4)": [4, -9, 4],
}


def test_however_the_ranks_end_they_end_and_nothing_stays():
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in ENDS]
    scripts = [(store.port, script) for store, script in zip(stores, ENDS, strict=True)]
    before = set(os.listdir("/dev/shm"))
    done = subprocess.run(
        [sys.executable, "-c", HOST, "3", json.dumps(scripts)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    for (script, codes), found in zip(ENDS.items(), json.loads(done.stdout), strict=True):
        assert found == codes, f"{script}\n{done.stderr}"
    assert not {f for f in set(os.listdir("/dev/shm")) - before if "ringdp" in f}


def leaves(comm: Communicator) -> None:
    """A rank closes right after its last collective, while the others may still be reading."""
    before = held()
    for i in range(150):
        with comm.duplicate() as other:
            x = torch.ones(1 if i % 3 else 300_000)
            other.all_reduce(x, algorithm="ring" if i % 2 else "direct")
            assert torch.all(x == comm.size)
    del other
    assert held() == before


@pytest.mark.parametrize("n", [2, 3])
def test_a_rank_may_leave_right_after_its_last_collective(ranks, n):
    ranks(n)(leaves)


TORCHRUN = """
import sys, torch, ringdp
comm = ringdp.init(timeout=20)
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
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2: 3.0", "rank 1 of 2: 3.0"]


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
