"""A trace's file: its place, its contents however a run ends, and paths that are refused."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import ringdp
from ringdp.comm import tracing
from ringdp.tape.meeting import Meeting
from tests.forks import CALL_TIMEOUT, die, store
from tests.ranks import on_ranks
from tests.tape.traces import TraceFile, read_trace

pytestmark = pytest.mark.process


def rank_1_dies(comm: ringdp.Communicator, report, path: Path, transport: str) -> None:
    tracing.HASTE = CALL_TIMEOUT  # a busy machine is slow
    if transport != "shm":
        comm = ringdp.init(transport=transport)
    talk = store()
    try:
        with ringdp.trace(path):
            comm.all_reduce(torch.ones(10))
            talk.set(f"done/{comm.rank}", "")
            if comm.rank == 1:
                # otherwise they could notice the death in the first call
                talk.wait(["done/0", "done/2"])
                die()
            comm.all_reduce(torch.ones(10))
    except ringdp.PeerLost as e:
        report(str(e).splitlines()[0])


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_a_rank_that_dies_leaves_the_others_parts_and_its_name(forks, tmp_path, transport):
    path = tmp_path / "run.json"
    ended = forks(3, rank_1_dies, path, transport)
    assert [e.code for e in ended] == [0, -signal.SIGKILL, 0]
    assert "rank 1" in ended[0].reported[0]
    read = TraceFile(path)
    assert sorted(read.about["parts"]) == ["0", "2"]
    assert set(read.about["missing"]) == {"1"}
    assert "ended before it wrote its part" in read.about["missing"]["1"]
    assert [e["args"].get("failed", False) for e in read.spans("collective", 0)] == [False, True]
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def die_before_the_trace(comm: ringdp.Communicator, report, path: Path, who: int) -> None:
    comm.barrier()
    if comm.rank == who:
        die()
    try:
        with ringdp.trace(path):
            report("it has started")
    except ringdp.PeerLost as e:
        report(str(e))


@pytest.mark.parametrize("who", [0, 1])
def test_starting_a_trace_does_not_wait_for_a_dead_rank(forks, tmp_path, who):
    ended = forks(3, die_before_the_trace, tmp_path / "run.json", who)
    expected = [[f"rank {rank} of 3 waited to trace; rank {who} has ended"] for rank in range(3)]
    expected[who] = []
    assert [e.reported for e in ended] == expected


@on_ranks(2)
def test_rank_0_decides_the_path_of_the_file(comm: ringdp.Communicator, tmp_path: Path) -> None:
    """Each rank passes another file name, and rank 1 is in another directory."""
    before = os.getcwd()
    if comm.rank == 1:
        (tmp_path / "other").mkdir()
    os.chdir(tmp_path / "other" if comm.rank == 1 else tmp_path)
    try:
        for name in (f"run{comm.rank}.json", "again.json"):
            with ringdp.trace(name):
                comm.all_reduce(torch.ones(10))
        with ringdp.trace("nothing.json"):
            pass
    finally:
        os.chdir(before)
    comm.barrier()  # rank 0 writes the files
    found = ["again.json", "nothing.json", "other", "run0.json"]
    assert sorted(p.name for p in tmp_path.iterdir()) == found
    assert list((tmp_path / "other").iterdir()) == []
    for name, calls in (("run0", 1), ("again", 1), ("nothing", 0)):
        read = TraceFile(tmp_path / f"{name}.json")
        assert sorted(read.about["parts"]) == ["0", "1"]
        assert [len(read.spans("collective", rank)) for rank in range(2)] == [calls] * 2


@on_ranks(2)
def test_the_file_is_in_the_directory_where_the_trace_began(
    comm: ringdp.Communicator, tmp_path: Path
) -> None:
    before, elsewhere = os.getcwd(), tmp_path / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    os.chdir(tmp_path)
    try:
        with ringdp.trace("run.json"):
            comm.all_reduce(torch.ones(10))
            os.chdir(elsewhere)
    finally:
        os.chdir(before)
    comm.barrier()  # rank 0 writes the file
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "run.json"]
    assert list(elsewhere.iterdir()) == []


@on_ranks(2)
def test_a_rank_writes_only_to_its_own_path(comm: ringdp.Communicator, tmp_path: Path) -> None:
    """The store holds another path than rank 0 wrote."""
    path, elsewhere = tmp_path / "there/run.json", tmp_path / "elsewhere"
    for folder in (path.parent, elsewhere):
        folder.mkdir(exist_ok=True)
    patiently = Meeting._patiently
    other = json.dumps(str(elsewhere / "run.json")).encode()

    def damaged(self: Meeting, key: str, rank: int) -> bytes:
        return patiently(self, key, rank).replace(json.dumps(str(path)).encode(), other)

    with patch.object(Meeting, "_patiently", damaged), ringdp.trace(path):
        comm.all_reduce(torch.ones(10))
    assert sorted(read_trace(comm, path).about["parts"]) == ["0", "1"]
    assert [p.name for p in path.parent.iterdir()] == ["run.json"]
    assert list(elsewhere.iterdir()) == []


@on_ranks(2)
def test_a_forked_child_cannot_end_its_parents_trace(
    comm: ringdp.Communicator, tmp_path: Path
) -> None:
    with ringdp.trace(path := tmp_path / "run.json") as trace:
        if not (child := os.fork()):
            try:
                trace.stop()
            except ringdp.UsageError as e:
                os._exit(0 if "forked from it, cannot end it" in str(e) else 2)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        comm.all_reduce(torch.ones(10))
    assert len(read_trace(comm, path).spans("collective")) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("text", ["a word", "0"])
@on_ranks(2)
def test_a_malformed_part_is_listed_as_missing(
    comm: ringdp.Communicator, tmp_path: Path, text: str
) -> None:
    """Rank 1 publishes malformed data instead of its part."""
    damaged = (
        patch.object(Meeting, "hand_in", _hand_in_text(text)) if comm.rank == 1 else nullcontext()
    )
    with damaged, ringdp.trace(path := tmp_path / "run.json"):
        comm.all_reduce(torch.ones(10))
    read = read_trace(comm, path)
    assert sorted(read.about["parts"]) == ["0"]
    assert read.about["missing"]["1"].startswith("rank 1's part of the trace cannot be had: ")


def _hand_in_text(text: str) -> Callable[..., None]:
    def hand_in(self: Meeting, part: Path, **_: bool) -> None:
        part.write_text("no part", encoding="utf-8")
        self._store.set(f"part/{self.rank}", text)

    return hand_in


@on_ranks(2)
def test_bad_paths_are_refused_on_every_rank(comm: ringdp.Communicator, tmp_path: Path) -> None:
    path, messages = tmp_path / "run.json", list[str]()
    if comm.rank == 0:
        os.mkfifo(tmp_path / "pipe")
    comm.barrier()
    (pipe,) = os.scandir(tmp_path)  # a path that is no Path
    for start in (
        lambda: ringdp.trace("/nowhere/run.json").start(),
        lambda: ringdp.trace(pipe).start(),
        lambda: ringdp.trace("a\0b").start(),
        lambda: ringdp.trace(f"{path}/").start(),
        *(lambda n=n: ringdp.trace(path.with_name("n" * n)).start() for n in (240, 300)),
        lambda: ringdp.trace("").start(),
        lambda: ringdp.trace(path).stop(),
    ):
        with pytest.raises(ringdp.UsageError) as found:
            start()
        messages.append(str(found.value))
    running = ringdp.trace(path).start()
    with pytest.raises(ringdp.UsageError, match="a trace runs in this process already"):
        ringdp.trace(path).start()
    with (
        patch.object(threading.Thread, "join", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        running.stop()
    running.stop()
    assert messages[0] == (
        "trace: cannot write /nowhere/run.json: No such file or directory; allowed: a file in "
        "a directory that exists and is writable"
    )
    assert messages[1].startswith(
        f"trace: cannot write {pipe.path}: it is a device or a pipe; allowed"
    )
    assert "embedded null " in messages[2]  # "byte"; from Python 3.13 on "character"
    assert all("nnn: File name too long; allowed" in message for message in messages[4:6])
    assert f"cannot write {path}/: it names a directory; allowed" in messages[3]
    assert "cannot write : a path is empty; allowed" in messages[6]
    assert messages[7] == "this trace does not run; start it first"
    comm.barrier()  # rank 0 writes the file
    assert path.exists()
