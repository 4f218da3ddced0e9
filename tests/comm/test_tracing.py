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
from ringdp.schedule import fuse, project, schedule
from ringdp.tape import recorder
from ringdp.transport.tape import ENTRIES
from tests.tape.traces import TraceFile
from tests.transport.nccl.faults import only_with_host_nccl
from tests.transport.test_conformance import star

pytestmark = pytest.mark.process


def calls(comm: ringdp.Communicator, path: Path) -> int:
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
    comm.all_reduce(torch.ones(10))  # after it
    assert not recorder.recording()
    return first


@pytest.fixture(scope="module")
def traced(ranks, tmp_path_factory) -> tuple[TraceFile, int]:
    path = tmp_path_factory.mktemp("trace") / "run.json"
    first, *_ = ranks(3)(calls, path)
    assert [p.name for p in path.parent.iterdir()] == ["run.json"]
    return TraceFile(path), first


def lets_go(comm: ringdp.Communicator, path: Path) -> None:
    with ringdp.trace(path):
        comm.duplicate().all_reduce(torch.ones(7))
        gc.collect()


def test_what_nobody_holds_any_more_is_there_too(ranks, tmp_path):
    ranks(2)(lets_go, tmp_path / "run.json")
    for rank in range(2):
        found = TraceFile(tmp_path / "run.json").spans("collective", rank)
        assert [e["args"]["elements"] for e in found] == [1, 7]


def test_every_collective_of_every_rank_is_there(traced):
    read, first = traced
    for rank in range(3):
        found = [e["args"] for e in read.spans("collective", rank)]
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


def test_chunks_lie_in_their_collective_and_are_its_rows(traced):
    read, first = traced
    read.check_nesting()
    for rank in range(3):
        ring = next(e for e in read.spans("collective", rank) if e["args"]["number"] == first + 2)
        chunks = [
            e
            for e in read.spans("chunk", rank)
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


def test_tiles_of_a_direct_exchange_add_up(traced):
    read, first = traced
    for rank in range(3):
        tiles = [e for e in read.spans("chunk", rank) if e["args"]["number"] == first + 1]
        moved = {
            what: sum(t["args"]["bytes"] for t in tiles if t["name"] == what)
            for what in ("lay out", "take", "collect")
        }
        own = 4 * len(torch.arange(1 << 20).tensor_split(3)[rank])
        assert moved == {"lay out": (4 << 20) - own, "take": own, "collect": (4 << 20) - own}


def interrupted(comm: ringdp.Communicator, path: Path) -> None:
    """On one core: each rank has to let the other go on in the middle of its steps."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with ringdp.trace(path):
            for _ in range(5):
                comm.all_reduce(torch.ones(1 << 20), async_op=True).wait()
    finally:
        os.sched_setaffinity(0, cores)


def test_tiles_that_are_interrupted_add_up(ranks, tmp_path):
    ranks(2)(interrupted, tmp_path / "run.json")
    read = TraceFile(tmp_path / "run.json")
    for rank in range(2):
        for call in read.spans("collective", rank):
            tiles = [
                e
                for e in read.spans("chunk", rank)
                if e["args"]["number"] == call["args"]["number"]
            ]
            assert sum(t["args"]["bytes"] for t in tiles) == 3 * (2 << 20)


def test_it_says_what_a_reader_needs(traced):
    read, _ = traced
    assert read.about["ranks"] == 3
    assert read.about["missing"] == {}
    assert sorted(read.about["parts"]) == ["0", "1", "2"]
    for part in read.about["parts"].values():
        assert (part["lost"], part["clock_error_us"]) == (0, 0)
        assert {c["transport"] for c in part["communicators"]} == {"shm"}
        told = {(s["collective"], s["algorithm"]): s for s in part["schedules"]}
        assert set(told) == {("all_reduce", "ring"), ("all_reduce", "star")}
        rounds = [
            [list(map(int, t)) for t in ts] for ts in schedule("all_reduce", "ring", 3).rounds
        ]
        assert told["all_reduce", "ring"]["rounds"] == rounds


LATE = 0.3  # s


def over_groups(comm: ringdp.Communicator, path: Path) -> None:
    if dist.is_initialized():  # by a test before this one
        dist.destroy_process_group()
    store = dist.PrefixStore(f"traced/{comm.issued}", comm._connect.args[0])
    dist.init_process_group("ringdp", store=store, rank=comm.rank, world_size=comm.size)
    both, alone = dist.new_group([0, 1]), [dist.new_group([rank]) for rank in (0, 1)][comm.rank]
    with ringdp.trace(path):
        for elements, group in enumerate((dist.group.WORLD, both, alone), 11):
            dist.all_reduce(torch.ones(elements), group=group)
        for elements in (14, 15):
            with rendezvous.over(both) as made:
                made.all_reduce(torch.ones(elements))
    dist.destroy_process_group()


def test_no_two_communicators_over_groups_have_one_name(ranks, tmp_path):
    ranks(2)(over_groups, tmp_path / "run.json")
    read = TraceFile(tmp_path / "run.json")
    found = [e["args"] for e in read.spans("collective")]
    calls = {(a["comm"], a["number"], a["elements"]) for a in found}
    assert len(calls) == len({call[:2] for call in calls})
    lengths = sorted(elements for *_, elements in calls if elements > 10)
    assert lengths == [11, 12, 13, 13, 14, 15], "13: each rank alone"


def alone_again(_: ringdp.Communicator, path: Path) -> None:
    with patch.dict(os.environ):
        for variable in VARIABLES:
            del os.environ[variable]
        with ringdp.trace(path):
            for _ in range(2):
                with ringdp.init() as comm:
                    comm.all_reduce(torch.ones(1))


def test_one_process_that_begins_again_has_another_communicator(ranks, tmp_path):
    ranks(1)(alone_again, tmp_path / "run.json")
    found = TraceFile(tmp_path / "run.json").spans("collective")
    assert len({(e["args"]["comm"], e["args"]["number"]) for e in found}) == len(found) > 1


def late_by_turns(comm: ringdp.Communicator, path: Path) -> None:
    """The other rank waits, for rank 1 first, then for rank 0: on the ranks' one clock."""
    with ringdp.trace(path):
        for late in (1, 0):
            comm.barrier()
            if comm.rank == late:
                while comm._transport.record(1 - late).begun <= comm.issued:
                    time.sleep(0.001)
                time.sleep(LATE)
            comm.all_reduce(torch.ones(10))


def test_who_waited_for_whom_shows_on_one_clock(ranks, tmp_path):
    ranks(2)(late_by_turns, tmp_path / "run.json")
    read = TraceFile(tmp_path / "run.json")
    for turn, late in ((1, 1), (3, 0)):
        late_one, early_one = (read.spans("collective", r)[turn] for r in (late, 1 - late))
        waited = late_one["ts"] - early_one["ts"]
        assert waited >= LATE * 1e6
        assert early_one["args"]["waited_us"] >= LATE / 2 * 1e6
        assert early_one["dur"] >= waited, "it ends when both have come"
        name = f"wait for all_reduce #{early_one['args']['number']}"
        waits = [w for w in read.spans("wait", 1 - late) if w["name"].startswith(name)]
        assert sum(w["dur"] for w in waits) >= LATE / 2 * 1e6


def over(pool: ringdp.Communicator, transport: str, path: Path) -> None:
    comm = ringdp.init(transport=transport)
    rendezvous._world = pool  # which the tests after this one use
    with ringdp.trace(path):
        comm.all_reduce(torch.ones(10))
        works = [
            comm.all_reduce(torch.ones(10), algorithm=algorithm, async_op=True)
            for algorithm in ("ring", star)
        ]
        for work in works:
            work.wait()
            work.wait()
    pool.barrier()  # else a rank that is done would be lost to one that is not
    comm.close()


@pytest.mark.parametrize("transport", ["c10d", "nccl-host"])
def test_a_transport_without_a_tape_is_seen_from_outside(ranks, tmp_path, transport):
    if transport == "nccl-host":
        only_with_host_nccl()
    ranks(2)(over, transport, tmp_path / "run.json")
    read = TraceFile(tmp_path / "run.json")
    read.check_nesting()
    for rank in range(2):
        found = [e["args"] for e in read.spans("collective", rank)]
        assert [(a["algorithm"], a["bytes"], a["background"]) for a in found] == [
            ("direct", 40, False),
            ("ring", 40, True),
            ("star", 40, True),
        ]
        (told,) = read.about["parts"][str(rank)]["schedules"]
        assert (told["algorithm"], told["ranks"], len(told["rounds"])) == ("star", 2, 2)
        assert len(read.spans("wait", rank)) == 5
        assert all("test_tracing.py:" in a["at"] for a in found)


def nameless(pool: ringdp.Communicator, path: Path) -> None:
    """Over a transport with a tape, and over one without."""
    comm = ringdp.init(transport="c10d")
    rendezvous._world = pool
    with ringdp.trace(path):
        for each in (pool, comm):
            each.all_reduce(torch.ones(10), algorithm=partial(star))
    pool.barrier()
    comm.close()


def test_an_algorithm_without_a_name_is_called_by_its_repr(ranks, tmp_path):
    ranks(2)(nameless, tmp_path / "run.json")
    read = TraceFile(tmp_path / "run.json")
    for rank in range(2):
        found = [e["args"]["algorithm"] for e in read.spans("collective", rank)]
        found += [told["algorithm"] for told in read.about["parts"][str(rank)]["schedules"]]
        assert len(found) == 3
        assert all(name.startswith("functools.partial(<function star at") for name in found)


def full(comm: ringdp.Communicator, path: Path) -> None:
    with ringdp.trace(path):
        recorder._over.set()  # nobody empties the tapes until the end
        recorder._drains.join()
        for _ in range(ENTRIES // 4):  # each of which takes four cells, and one or more for chunks
            comm.all_reduce(torch.ones(1))


def test_what_there_is_no_room_for_is_counted(ranks, tmp_path):
    ranks(2)(full, tmp_path / "run.json")
    read = TraceFile(tmp_path / "run.json")
    assert all(part["lost"] > 0 for part in read.about["parts"].values())
    assert len(read.spans("collective", 0)) > 0
