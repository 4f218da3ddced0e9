"""A trace holds every collective of every rank, chunk by chunk."""

from __future__ import annotations

import gc
import os
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import ringdp
from ringdp.comm import rendezvous
from ringdp.comm.store import VARIABLES
from ringdp.comm.traced import TapeObserver
from ringdp.schedule import fuse, project, schedule
from ringdp.tape import recorder
from tests.ranks import on_ranks
from tests.tape.traces import TraceFile, read_trace
from tests.transport.nccl.faults import only_with_host_nccl
from tests.transport.over import init_over, over
from tests.transport.test_conformance import star

pytestmark = pytest.mark.process


def trace_calls(comm: ringdp.Communicator, path: Path) -> int:
    comm.all_reduce(torch.ones(10))  # before the trace
    with ringdp.trace(path):
        first = comm.issued
        comm.all_reduce(torch.ones(10))
        comm.all_reduce(torch.ones(1 << 20))
        comm.all_reduce(torch.ones(40_000), algorithm="ring", tag=7)
        comm.all_reduce(torch.ones(5, dtype=torch.float64), "max", algorithm=star)
        out = torch.empty(comm.size * 3)
        comm.all_gather(out, torch.ones(3), async_op=True).wait()
        with comm.duplicate() as other:
            other.broadcast(torch.ones(9), 1)
    comm.all_reduce(torch.ones(10))  # after the trace
    assert not recorder.recording()
    return first


@pytest.fixture(scope="module")
def traced(ranks, tmp_path_factory) -> tuple[TraceFile, int]:
    path = tmp_path_factory.mktemp("trace") / "run.json"
    first, *_ = ranks(3)(trace_calls, path)
    assert [p.name for p in path.parent.iterdir()] == ["run.json"]
    return TraceFile(path), first


@on_ranks(2)
def test_collectives_of_a_dropped_communicator_are_traced(
    comm: ringdp.Communicator, tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    with ringdp.trace(path):
        comm.duplicate().all_reduce(torch.ones(7))
        gc.collect()
    found = read_trace(comm, path).spans("collective", comm.rank)
    assert [e["args"]["elements"] for e in found] == [1, 7]


def test_every_collective_of_every_rank_is_traced(traced):
    trace, first = traced
    for rank in range(3):
        found = [e["args"] for e in trace.spans("collective", rank)]
        world = next(a["comm"] for a in found if a["number"] == first)
        mine = [
            (a["number"] - first, a["collective"], a["algorithm"], a["bytes"], a["tag"])
            for a in found
            if a["comm"] == world
        ]
        assert mine[:5] == [
            (0, "all_reduce", "direct", 40, 0),
            (1, "all_reduce", "direct", 4 << 20, 0),
            (2, "all_reduce", "ring", 160_000, 7),
            (3, "all_reduce", "star", 40, 0),
            (4, "all_gather", "direct", 36, 0),
        ]
        others = [a["collective"] for a in found if a["comm"] != world]
        assert others == ["broadcast"]
        assert all("test_tracing.py:" in a["at"] for a in found)
        assert [a["background"] for a in found if a["comm"] == world][:5] == [False] * 4 + [True]


def test_chunks_are_the_rows_of_their_collectives_program(traced):
    trace, first = traced
    trace.check_nesting()
    for rank in range(3):
        ring = next(e for e in trace.spans("collective", rank) if e["args"]["number"] == first + 2)
        chunks = [
            e
            for e in trace.spans("chunk", rank)
            if e["tid"] == ring["tid"] and e["args"]["number"] == first + 2
        ]
        program = fuse(project(schedule("all_reduce", "ring", 3), rank))
        whole = ring["ts"], ring["ts"] + ring["dur"]
        assert [c["name"] for c in chunks] == [row.name for row in program]
        assert [c["args"]["round"] for c in chunks] == [row.round for row in program]
        assert all(whole[0] <= c["ts"] and c["ts"] + c["dur"] <= whole[1] + 1e-3 for c in chunks)
        assert sum(c["args"]["bytes"] for c in chunks if "to" in c["args"]) == pytest.approx(
            4 * 160_000 / 3, rel=1e-3
        )


def test_tiles_of_a_direct_exchange_sum_to_its_bytes(traced):
    trace, first = traced
    for rank in range(3):
        tiles = [e for e in trace.spans("chunk", rank) if e["args"]["number"] == first + 1]
        moved = {
            what: sum(t["args"]["bytes"] for t in tiles if t["name"] == what)
            for what in ("lay out", "take", "collect")
        }
        own = 4 * len(torch.arange(1 << 20).tensor_split(3)[rank])
        assert moved == {"lay out": (4 << 20) - own, "take": own, "collect": (4 << 20) - own}


@on_ranks(2)
def test_interrupted_tiles_sum_to_their_bytes(comm: ringdp.Communicator, tmp_path: Path) -> None:
    """All ranks on one core: a rank has to let the others run in the middle of its tile."""
    path, cores = tmp_path / "run.json", os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with ringdp.trace(path):
            for _ in range(5):
                comm.all_reduce(torch.ones(1 << 20), async_op=True).wait()
    finally:
        os.sched_setaffinity(0, cores)
    trace = read_trace(comm, path)
    calls = trace.spans("collective", comm.rank)
    assert len(calls) == 5
    for call in calls:
        tiles = [
            e
            for e in trace.spans("chunk", comm.rank)
            if e["args"]["number"] == call["args"]["number"]
        ]
        assert sum(t["args"]["bytes"] for t in tiles) == 3 * (2 << 20)


def test_the_trace_describes_ranks_clocks_and_schedules(traced):
    trace, _ = traced
    assert trace.about["ranks"] == 3
    assert trace.about["missing"] == {}
    assert sorted(trace.about["parts"]) == ["0", "1", "2"]
    for part in trace.about["parts"].values():
        assert (part["lost"], part["clock_error_us"]) == (0, 0)
        assert {c["transport"] for c in part["communicators"]} == {"shm"}
        schedules = {(s["collective"], s["algorithm"]): s for s in part["schedules"]}
        assert set(schedules) == {("all_reduce", "ring"), ("all_reduce", "star")}
        rounds = [
            [list(map(int, t)) for t in ts] for ts in schedule("all_reduce", "ring", 3).rounds
        ]
        assert schedules["all_reduce", "ring"]["rounds"] == rounds


LATE = 0.3  # seconds
ENTRIES = 1 << 10  # of a short tape


@on_ranks(2)
def test_communicators_over_groups_have_distinct_names(
    comm: ringdp.Communicator, tmp_path: Path
) -> None:
    if dist.is_initialized():  # left initialized by an earlier test
        dist.destroy_process_group()
    store = dist.PrefixStore(f"traced/{comm.issued}", comm._connect.store)
    dist.init_process_group("ringdp", store=store, rank=comm.rank, world_size=comm.size)
    both, alone = dist.new_group([0, 1]), [dist.new_group([rank]) for rank in (0, 1)][comm.rank]
    with ringdp.trace(path := tmp_path / "run.json"):
        for elements, group in enumerate((dist.group.WORLD, both, alone), 11):
            dist.all_reduce(torch.ones(elements), group=group)
        for elements in (14, 15):
            with rendezvous.over(both) as made:
                made.all_reduce(torch.ones(elements))
    dist.destroy_process_group()
    found = [e["args"] for e in read_trace(comm, path).spans("collective")]
    trace_calls = {(a["comm"], a["number"], a["elements"]) for a in found}
    assert len(trace_calls) == len({call[:2] for call in trace_calls})
    lengths = sorted(elements for *_, elements in trace_calls if elements > 10)
    assert lengths == [11, 12, 13, 13, 14, 15], "13 twice: once on each rank"


@on_ranks(1)
def test_a_single_process_names_each_communicator_differently(
    comm: ringdp.Communicator, tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    with patch.dict(os.environ):
        for variable in VARIABLES:
            del os.environ[variable]
        with ringdp.trace(path):
            for _ in range(2):
                with ringdp.init() as alone:
                    alone.all_reduce(torch.ones(1))
    found = read_trace(comm, path).spans("collective")
    assert len({(e["args"]["comm"], e["args"]["number"]) for e in found}) == len(found) > 1


@on_ranks(2)
def test_waits_for_late_ranks_are_traced_on_one_clock(
    comm: ringdp.Communicator, tmp_path: Path
) -> None:
    """The other rank waits, for rank 1 first, then for rank 0: on the ranks' one clock."""
    with ringdp.trace(path := tmp_path / "run.json"):
        for late in (1, 0):
            comm.barrier()
            if comm.rank == late:
                while comm._transport.record(1 - late).begun <= comm.issued:
                    time.sleep(0.001)
                time.sleep(LATE)
            comm.all_reduce(torch.ones(10))
    trace = read_trace(comm, path)
    for turn, late in ((1, 1), (3, 0)):
        late_one, early_one = (trace.spans("collective", r)[turn] for r in (late, 1 - late))
        waited = late_one["ts"] - early_one["ts"]
        assert waited >= LATE * 1e6
        assert early_one["args"]["waited_us"] >= LATE / 2 * 1e6
        assert early_one["dur"] >= waited, "it ends after both ranks have called"
        name = f"wait for all_reduce #{early_one['args']['number']}"
        waits = [w for w in trace.spans("wait", 1 - late) if w["name"].startswith(name)]
        assert sum(w["dur"] for w in waits) >= LATE / 2 * 1e6


def trace_all_reduces(comm: ringdp.Communicator, path: Path) -> None:
    with ringdp.trace(path):
        comm.all_reduce(torch.ones(10))
        works = [
            comm.all_reduce(torch.ones(10), algorithm=algorithm, async_op=True)
            for algorithm in ("ring", star)
        ]
        for work in works:
            work.wait()
            work.wait()


@pytest.mark.parametrize("transport", ["c10d", "nccl-host"])
def test_collectives_of_transports_without_a_tape_are_traced(ranks, tmp_path, transport):
    if transport == "nccl-host":
        only_with_host_nccl()
    ranks(2)(over, transport, trace_all_reduces, tmp_path / "run.json")
    trace = TraceFile(tmp_path / "run.json")
    trace.check_nesting()
    for rank in range(2):
        found = [e["args"] for e in trace.spans("collective", rank)]
        assert [(a["algorithm"], a["bytes"], a["background"]) for a in found] == [
            ("direct", 40, False),
            ("ring", 40, True),
            ("star", 40, True),
        ]
        (own,) = trace.about["parts"][str(rank)]["schedules"]
        assert (own["algorithm"], own["ranks"], len(own["rounds"])) == (
            "star",
            2,
            2,
        )
        assert len(trace.spans("wait", rank)) == 5
        assert all("test_tracing.py:" in a["at"] for a in found)


@on_ranks(2)
def test_an_algorithm_without_a_name_is_shown_by_its_repr(
    pool: ringdp.Communicator, tmp_path: Path
) -> None:
    """Over a transport with a tape, and over one without."""
    with init_over(pool, "c10d") as comm:
        with ringdp.trace(path := tmp_path / "run.json"):
            for each in (pool, comm):
                each.all_reduce(torch.ones(10), algorithm=partial(star))
        trace = read_trace(pool, path)
    found = [e["args"]["algorithm"] for e in trace.spans("collective", pool.rank)]
    found += [own["algorithm"] for own in trace.about["parts"][str(pool.rank)]["schedules"]]
    assert len(found) == 3
    assert all(name.startswith("functools.partial(<function star at") for name in found)


@on_ranks(2)
def test_lost_entries_are_counted(comm: ringdp.Communicator, tmp_path: Path) -> None:
    short = patch("ringdp.comm.traced.ENTRIES", ENTRIES)
    with short, ringdp.trace(path := tmp_path / "run.json"), comm.duplicate() as other:
        recorder._over.set()  # the tapes are not emptied until the end
        recorder._drains.join()
        for _ in range(ENTRIES // 4):  # each call takes four cells, and one or more for chunks
            other.all_reduce(torch.ones(3))
    trace = read_trace(comm, path)
    assert all(part["lost"] > 0 for part in trace.about["parts"].values())
    assert any(e["args"]["elements"] == 3 for e in trace.spans("collective", comm.rank))


class Tape:
    """It lost 3 entries before the trace, loses one more, and has two, of 64 bytes each."""

    lost, done = 3, bytes(128)

    def trace(self, entries: int) -> None:
        self.lost += 1

    def untrace(self) -> None: ...

    def tape(self) -> tuple[bytes, bytes, int]:
        return self.done, b"", self.lost


@pytest.mark.parametrize(("room", "lost"), [(128, 1), (127, 3)])
def test_only_what_this_trace_loses_or_has_no_room_for_is_counted(room: int, lost: int) -> None:
    with patch("ringdp.comm.traced.MOST_BYTES", room), patch("ringdp.comm.traced.read", list):
        entries, counted = TapeObserver(Tape()).end()
    assert (len(entries), counted) == (128 * (room == 128), lost)
