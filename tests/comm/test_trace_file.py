"""A trace's file: where it lies, that it is there however a run ends, and where it cannot be."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import ringdp
from ringdp.comm import tracing
from ringdp.tape.meeting import Meeting
from tests.forks import CALL_TIMEOUT, store
from tests.tape.traces import TraceFile

pytestmark = pytest.mark.process


def dies(comm: ringdp.Communicator, report, path: Path, transport: str) -> None:
    tracing.HASTE = CALL_TIMEOUT  # a busy machine is slow
    if transport != "shm":
        comm = ringdp.init(transport=transport)
    talk = store()
    try:
        with ringdp.trace(path):
            comm.all_reduce(torch.ones(10))
            talk.set(f"done/{comm.rank}", "")
            if comm.rank == 1:
                talk.wait(["done/0", "done/2"])  # else they may hear of it in the first one
                os.kill(os.getpid(), signal.SIGKILL)
            comm.all_reduce(torch.ones(10))
    except ringdp.PeerLost as e:
        report(str(e).splitlines()[0])


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_a_rank_that_dies_leaves_the_others_parts_and_its_name(forks, tmp_path, transport):
    path = tmp_path / "run.json"
    ended = forks(3, dies, path, transport)
    assert [e.code for e in ended] == [0, -signal.SIGKILL, 0]
    assert "rank 1" in ended[0].reported[0]
    read = TraceFile(path)
    assert sorted(read.about["parts"]) == ["0", "2"]
    assert set(read.about["missing"]) == {"1"}
    assert "ended before it wrote its part" in read.about["missing"]["1"]
    assert [e["args"].get("failed", False) for e in read.spans("collective", 0)] == [False, True]
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def dies_before(comm: ringdp.Communicator, report, path: Path, who: int) -> None:
    comm.barrier()
    if comm.rank == who:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with ringdp.trace(path):
            report("it has started")
    except ringdp.PeerLost as e:
        report(str(e))


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_has_died_is_not_waited_for_to_start(forks, tmp_path, who):
    ended = forks(3, dies_before, tmp_path / "run.json", who)
    said = [[f"rank {rank} of 3 waited to trace; rank {who} has ended"] for rank in range(3)]
    said[who] = []
    assert [e.reported for e in ended] == said


def calls_by_turns(comm: ringdp.Communicator, at: Path) -> None:
    """Each rank with a file of its own in mind, and rank 1 in another directory."""
    before = os.getcwd()
    if comm.rank == 1:
        (at / "other").mkdir()
    os.chdir(at / "other" if comm.rank == 1 else at)
    try:
        for name in (f"run{comm.rank}.json", "again.json"):
            with ringdp.trace(name):
                comm.all_reduce(torch.ones(10))
        with ringdp.trace("nothing.json"):
            pass
    finally:
        os.chdir(before)


def test_the_file_is_rank_0s_wherever_the_others_are(ranks, tmp_path):
    ranks(2)(calls_by_turns, tmp_path)
    found = ["again.json", "nothing.json", "other", "run0.json"]
    assert sorted(p.name for p in tmp_path.iterdir()) == found
    assert list((tmp_path / "other").iterdir()) == []
    for name, calls in (("run0", 1), ("again", 1), ("nothing", 0)):
        read = TraceFile(tmp_path / f"{name}.json")
        assert sorted(read.about["parts"]) == ["0", "1"]
        assert [len(read.spans("collective", rank)) for rank in range(2)] == [calls] * 2


def goes_elsewhere(comm: ringdp.Communicator, at: Path) -> None:
    before = os.getcwd()
    os.chdir(at)
    try:
        with ringdp.trace("run.json"):
            comm.all_reduce(torch.ones(10))
            os.chdir(at / "elsewhere")
    finally:
        os.chdir(before)


def test_the_file_is_where_the_trace_began(ranks, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    ranks(2)(goes_elsewhere, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "run.json"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def told_elsewhere(comm: ringdp.Communicator, path: Path, elsewhere: Path) -> None:
    """In the store stands another path than rank 0's."""
    said = Meeting._patiently
    other = json.dumps(str(elsewhere)).encode()

    def damaged(self: Meeting, key: str, rank: int) -> bytes:
        return said(self, key, rank).replace(json.dumps(str(path)).encode(), other)

    with patch.object(Meeting, "_patiently", damaged), ringdp.trace(path):
        comm.all_reduce(torch.ones(10))


def test_the_store_does_not_say_where_a_rank_writes(ranks, tmp_path):
    (there := tmp_path / "there").mkdir()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    ranks(2)(told_elsewhere, there / "run.json", elsewhere / "run.json")
    assert sorted(TraceFile(there / "run.json").about["parts"]) == ["0", "1"]
    assert [p.name for p in there.iterdir()] == ["run.json"]
    assert list(elsewhere.iterdir()) == []


def says_nonsense(comm: ringdp.Communicator, path: Path, said: str) -> None:
    """Of rank 1's part."""
    damaged = patch.object(Meeting, "hand_in", _says(said)) if comm.rank == 1 else nullcontext()
    with damaged, ringdp.trace(path):
        comm.all_reduce(torch.ones(10))


def _says(said: str) -> Callable[..., None]:
    def hand_in(self: Meeting, part: Path, **_: bool) -> None:
        part.write_text("no part", encoding="utf-8")
        self._store.set(f"part/{self.rank}", said)

    return hand_in


@pytest.mark.parametrize("said", ["a word", "0"])
def test_a_part_that_makes_no_sense_costs_its_ranks_alone(ranks, tmp_path, said):
    ranks(2)(says_nonsense, tmp_path / "run.json", said)
    read = TraceFile(tmp_path / "run.json")
    assert sorted(read.about["parts"]) == ["0"]
    assert read.about["missing"]["1"].startswith("rank 1's part of the trace cannot be had: ")


def refused(comm: ringdp.Communicator, path: Path, pipe: Path) -> list[str]:
    said = []
    for start in (
        lambda: ringdp.trace("/nowhere/run.json").start(),
        lambda: ringdp.trace(pipe).start(),
        lambda: ringdp.trace("a\0b").start(),
        lambda: ringdp.trace(path.with_name("n" * 240)).start(),
        lambda: ringdp.trace(path).stop(),
    ):
        with pytest.raises(ringdp.UsageError) as found:
            start()
        said.append(str(found.value))
    running = ringdp.trace(path).start()
    with pytest.raises(ringdp.UsageError, match="a trace runs in this process already"):
        ringdp.trace(path).start()
    running.stop()
    return said


def test_mistakes_are_told_on_every_rank(ranks, tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    for said in ranks(2)(refused, tmp_path / "run.json", pipe):
        assert said[0] == (
            "trace: cannot write /nowhere/run.json: No such file or directory; allowed: a file in "
            "a directory that exists and is writable"
        )
        assert said[1].startswith(f"trace: cannot write {pipe}: it is a device or a pipe; allowed")
        assert "embedded null " in said[2]  # byte, or from Python 3.13 on character
        assert "nnn: File name too long; allowed" in said[3]
        assert said[4] == "this trace does not run; start it first"
    assert (tmp_path / "run.json").exists()
