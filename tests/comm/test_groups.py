"""`split`, and `group`, which waits for several calls at once."""

from __future__ import annotations

import sys
import threading
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ringdp
from ringdp import Communicator
from ringdp.comm.work import Group
from tests.comm.failing import catch, leaves_nothing
from tests.forks import Forks, Report
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


def total(comm: Communicator, number: float) -> float:
    x = torch.full((1000,), number)
    comm.all_reduce(x)
    assert torch.all(x == x[0])
    return x[0].item()


@leaves_nothing
def check_split(comm: Communicator) -> None:
    n, me = comm.size, comm.rank
    odd = comm.split(me % 2)
    assert odd is not None
    same = [r for r in range(n) if r % 2 == me % 2]
    assert (odd.rank, odd.size) == (same.index(me), len(same))
    assert total(odd, me) == sum(same)
    if odd.size > 1:  # in messages, ranks are those of the part
        x = torch.tensor([me])
        odd.isend(x, (odd.rank + 1) % odd.size)
        odd.recv(x, (odd.rank - 1) % odd.size)
        assert x == same[odd.rank - 1]

    backwards = comm.split(0, key=-me)
    assert backwards is not None
    assert backwards.rank == n - 1 - me
    x = torch.tensor([me])
    backwards.broadcast(x, 0)
    assert x == n - 1
    shared = comm.empty(100_000).fill_(me)  # in memory that the two share, if they share any
    backwards.all_reduce(shared)
    assert torch.all(shared == sum(range(n)))
    assert backwards._transport.arena is comm._transport.arena

    alone = comm.split(me)
    assert alone is not None
    assert (alone.rank, alone.size) == (0, 1)
    assert total(alone, 7) == 7

    some = comm.split(3 if me else None)
    assert (some is None) == (me == 0)
    if some is not None:
        assert total(some, me) == sum(range(n))
        with some.duplicate() as again:  # a part can be duplicated and split in turn
            assert total(again, me) == sum(range(n))
        nested = some.split(some.rank // 2)
        assert nested is not None
        first = some.rank // 2 * 2
        assert total(nested, some.rank) == sum(r for r in (first, first + 1) if r < n - 1)
        nested.close()
        some.close()
    for made in (odd, backwards, alone):
        made.close()
    with pytest.raises(ringdp.UsageError, match="color is -1"):
        comm.split(-1)
    assert total(comm, 1) == n


@pytest.mark.parametrize("n", [1, 2, 4])
def test_split_makes_communicators_of_some_ranks(ranks, n: int):
    ranks(n)(check_split)


def differ(comm: Communicator, report: Report) -> None:
    part = comm.split(comm.rank % 2)
    assert part is not None
    caught = catch(part, part.barrier if comm.rank == 3 else lambda: total(part, 1))
    report(caught and caught.text)


def test_errors_tell_the_ranks_numbers_in_the_job(forks: Forks) -> None:
    texts = [reported[0] for _, reported in forks(4, differ)]
    for rank in (1, 3):
        assert "called differently" in texts[rank]
        assert "\nranks here: 0 is 1 of the job, 1 is 3 of the job\n" in texts[rank]


@on_ranks(4)
def test_a_rank_may_be_in_several_parts_at_once(comm: Communicator) -> None:
    """A 2 x 2 grid: each rank is in two parts, and uses both at once on two threads."""
    row, column = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
    assert row is not None
    assert column is not None
    found: dict[str, list[float]] = {"row": [], "column": []}

    def run(name: str, on: Communicator) -> None:
        for i in range(50):
            found[name].append(total(on, comm.rank + i))

    threads = [threading.Thread(target=run, args=a) for a in (("row", row), ("column", column))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    in_row, in_column = comm.rank // 2 * 2, comm.rank % 2
    assert found["row"] == [2 * in_row + 1 + 2 * i for i in range(50)]
    assert found["column"] == [2 * in_column + 2 + 2 * i for i in range(50)]
    row.close()
    column.close()


def check_group(comm: Communicator) -> None:
    n, me = comm.size, comm.rank
    for elements in (1, 100_000):
        for _ in range(3):  # later rounds repeat the first one's calls
            a = [torch.full((elements,), float(me + i)) for i in range(3)]
            gathered, message = torch.zeros(n * elements), torch.zeros(elements)
            with comm.group() as group:
                for x in a:
                    comm.all_reduce(x)
                comm.all_gather(gathered, torch.full((elements,), float(me)))
                with comm.group():
                    comm.reduce(a[0].clone().t(), 0)
                if n > 1:
                    comm.send(a[2] * 0 + me, (me + 1) % n)
                    comm.irecv(message, (me - 1) % n)
                comm.all_reduce(a[2], async_op=True)
            assert len(group.works) == (7 if n > 1 else 5)
            assert group.is_completed()
            assert group.exception() is None
            sums = [sum(range(n)) + n * i for i in range(3)]
            assert torch.all(a[0] == sums[0])
            assert torch.all(a[1] == sums[1])
            assert torch.all(a[2] == n * sums[2])
            assert torch.equal(gathered.view(n, -1)[:, 0], torch.arange(float(n)))
            assert n == 1 or torch.all(message == (me - 1) % n)


@pytest.mark.parametrize("n", [1, 3])
def test_calls_in_a_group_give_their_usual_results(ranks, n: int):
    ranks(n)(check_group)


def test_the_works_of_a_group_share_its_timeout():
    given: list[float] = []
    work: Any = SimpleNamespace(wait=given.append)
    group = Group([work, work])
    group.wait(60)
    assert 60 >= given[0] >= given[1] > 0
    given.clear()
    group.wait(0)
    assert given == [0, 0]  # not less, though time has passed


def test_a_group_is_not_completed_while_its_first_work_runs():
    """The communicator fails between the looks at two works: `wait` begins with the first."""
    runs: Any = SimpleNamespace(is_completed=lambda: False, exception=lambda: None)
    failed: Any = SimpleNamespace(is_completed=lambda: True, exception=ringdp.PeerLost)
    assert not Group([runs, failed]).is_completed()


@on_ranks(2)
def test_a_group_waits_once_at_its_end(comm: Communicator) -> None:
    """Nothing in the block waits: rank 0's calls complete only after rank 1 has seen them begin."""
    with comm.duplicate() as other:
        x, y = torch.ones(10), torch.ones(300_000)
        if comm.rank == 0:
            with other.group(async_op=True) as group:
                other.all_reduce(x)
                other.all_reduce(y)
                other.all_reduce(x)
            comm.barrier()
            group.wait()
        else:
            comm.barrier()
            for t in (x, y, x):
                other.all_reduce(t)
        assert torch.all(x == 4)
        assert torch.all(y == 2)
        with pytest.raises(ringdp.UsageError, match="irecv"), comm.group():
            comm.recv(x)
        with pytest.raises(ZeroDivisionError), comm.group():
            comm.all_reduce(x).wait(1 / 0)
        comm.barrier()  # the communicator is no longer in a group
        assert torch.all(x == 8)
        if comm.rank == 0:
            with other.group(async_op=True) as late:
                other.all_reduce(x)
            with pytest.raises(ringdp.CollectiveTimeout):
                late.wait(0.05)
            assert isinstance(late.exception(), ringdp.CollectiveTimeout)
            assert late.is_completed()
            comm.barrier()
        else:
            comm.barrier()
            with pytest.raises(ringdp.CollectiveTimeout):
                other.barrier()


@on_ranks(2)
def test_repr_shows_label_rank_size_and_transport(comm: Communicator) -> None:
    with comm.duplicate() as other:
        other.label("gradients")
        alone = comm.split(comm.rank)
        assert alone is not None
        with alone:
            assert repr(other) == f"<gradients: rank {comm.rank} of 2 over shm>"
            assert repr(alone) == f"<communicator {alone._name}: rank 0 of 1 over shm>"


@on_ranks(2)
def test_ctrl_c_as_a_group_begins_or_ends_does_not_leave_it_open(comm: Communicator) -> None:
    for interrupted_call in count():
        calls = count()

        def interrupt(*_: object) -> None:
            if next(calls) == interrupted_call:  # noqa: B023
                raise KeyboardInterrupt

        sys.settrace(interrupt)  # it is called as a function begins
        try:
            with comm.group():
                pass
        except KeyboardInterrupt:
            comm.isend(torch.ones(1), 1 - comm.rank)
            comm.recv(torch.ones(1))  # an error in a group
        else:
            break
        finally:
            sys.settrace(None)
    assert interrupted_call > 1


@on_ranks(1)
def test_a_group_begins_once(comm: Communicator) -> None:
    """Else a second end would leave it open."""
    group = comm.group()
    with pytest.raises(RuntimeError, match=r"allowed: a group\(\) for each block"), group, group:
        pass
    assert comm._group is None
    with pytest.raises(RuntimeError, match="began twice"), group:
        pass
