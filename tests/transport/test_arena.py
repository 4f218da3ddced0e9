"""Tensors in the shared arena: their addresses and their lifetime. test_conformance.py has results
computed in them."""

from __future__ import annotations

import gc
import re
from unittest.mock import Mock, patch

import pytest
import torch

from ringdp import CollectiveTimeout, CommunicationError, Communicator
from ringdp.transport.shm import transport as shm
from tests.comm.failing import leaves_nothing
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


@on_ranks(2)
def test_memory_is_reused_after_the_last_view_is_gone(comm: Communicator) -> None:
    arena = comm._transport.arena
    assert arena is not None
    gc.collect()
    arena._join()
    before = arena._free
    a = comm.empty(1000, 3, dtype=torch.float64)
    view = a[10:20]
    where = a.data_ptr()
    assert arena.address <= where < arena.address + arena.bytes
    assert where % 64 == 0
    assert comm.empty(5).data_ptr() != where
    del a
    assert comm.empty(1000, 3, dtype=torch.float64).data_ptr() != where, (
        "a view still uses the memory"
    )
    view.fill_(1)
    del view
    again = comm.empty(1000, 3, dtype=torch.float64)
    assert again.data_ptr() == where, "the memory is reused"
    del again
    gc.collect()
    arena._join()
    assert arena._free == before, "free blocks are merged"


@on_ranks(2)
def test_an_allocation_that_does_not_fit_is_an_error(comm: Communicator) -> None:
    message = "no room in the arena for 4,503,599,627,370,496 bytes: of this rank's"
    with pytest.raises(CommunicationError, match=f"^{message}") as error:
        comm.empty(1 << 50)
    (free,) = re.findall(r"([\d,]+) are free", str(error.value))
    assert int(free.replace(",", "")) > 1 << 20, free


@on_ranks(2)
def test_a_tensor_outlives_its_communicator(comm: Communicator) -> None:
    """A duplicate shares the arena, and a tensor stays valid after the communicator that made
    it."""
    with comm.duplicate() as other:
        x = other.empty(300_000).fill_(comm.rank + 1.0)
        comm.all_reduce(x)
    del other
    gc.collect()
    assert x.sum() == 900_000


@on_ranks(1)
def test_a_duplicate_allocates_no_arena(comm: Communicator) -> None:
    with patch.object(shm, "create", Mock(wraps=shm.create)) as spy:
        comm.duplicate().close()
    assert [call.args[0] for call in spy.call_args_list] == ["ringdp", "ringdp-mail"]


@on_ranks(2)
@leaves_nothing
def test_memory_of_a_failed_call_is_not_reused_too_early(comm: Communicator) -> None:
    """Not while the other rank may still write to it, but after that rank has closed."""
    other = comm.duplicate()
    x = comm.empty(300_000)
    where = x.data_ptr()
    if comm.rank == 0:
        with pytest.raises(CollectiveTimeout):
            other.all_reduce(x, async_op=True).wait(0.01)
        other.close()
        del x
        gc.collect()
        assert comm.empty(300_000).data_ptr() != where
        comm.barrier()
    else:
        comm.barrier()
        other.close()
    comm.barrier()
    assert comm.rank or comm.empty(300_000).data_ptr() == where


@on_ranks(2)
def test_memory_may_be_freed_during_an_allocation(comm: Communicator) -> None:
    """Reference cycles that hold arena memory are collected at every point of an allocation."""
    thresholds = gc.get_threshold()
    kept = []
    try:
        for allocations in range(1, 60):
            cycle: list[object] = [comm.empty(100)]
            cycle.append(cycle)
            del cycle
            gc.set_threshold(allocations)
            kept.append(comm.empty(100))
    finally:
        gc.set_threshold(*thresholds)
    assert len({x.data_ptr() for x in kept}) == 59
