"""The pool that passes the memory of gathered units from one to the next."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import Communicator
from ringdp.parallel.pool import _SWAPS, Pool, beside, show
from tests.parallel.loop_models import batch, block, loss
from tests.ranks import on_ranks

needs_swap = pytest.mark.skipif(not _SWAPS, reason="this torch's storages swap no memory")
BYTES = 1 << 20


def fill(pool: Pool, size: int = BYTES) -> torch.Tensor:
    tensor = torch.empty(0, dtype=torch.uint8)
    pool.fill(tensor.untyped_storage(), size)
    return tensor.set_(tensor.untyped_storage(), 0, (size,))


@needs_swap
def test_memory_of_an_emptied_storage_is_reused_for_the_same_size() -> None:
    pool = Pool()
    first, second = fill(pool), fill(pool)
    addresses = {first.data_ptr(), second.data_ptr()}
    for tensor in (first, second):
        pool.empty(tensor.untyped_storage())
    assert {fill(pool).data_ptr(), fill(pool).data_ptr()} <= addresses


def test_views_of_a_refilled_storage_see_its_new_values() -> None:
    pool = Pool()
    tensor = fill(pool)
    view = tensor[8:16]
    pool.empty(tensor.untyped_storage())
    assert tensor.untyped_storage().nbytes() == 0
    pool.fill(tensor.untyped_storage(), BYTES)
    tensor.fill_(3)
    assert view.tolist() == [3] * 8


@needs_swap
def test_views_see_no_memory_before_it_is_shown() -> None:
    pool = Pool()
    tensor = fill(pool)
    coming = beside(tensor)
    assert coming.untyped_storage().nbytes() == 0
    for value in range(2):  # with memory that is reused, and with new one
        pool.empty(tensor.untyped_storage())
        pool.fill(coming.untyped_storage(), BYTES)
        coming.fill_(value)
        assert tensor.untyped_storage().nbytes() == 0
        show(coming, tensor)
        assert (tensor == value).all()
        assert coming.untyped_storage().nbytes() == 0
        pool.let_go()


@needs_swap
def test_memory_of_another_size_is_freed_before_more_is_allocated() -> None:
    pool = Pool()
    pool.empty(fill(pool).untyped_storage())
    assert [s.nbytes() for s in pool._kept] == [BYTES]
    assert fill(pool, BYTES // 2).untyped_storage().nbytes() == BYTES // 2
    assert pool._kept == []


@pytest.mark.parametrize(("device", "swaps"), [("cpu", False), ("meta", True)])
def test_storages_that_swap_no_memory_are_filled_in_place(
    monkeypatch: pytest.MonkeyPatch, device: str, swaps: bool
) -> None:
    """Those of an older torch, and those on a device, whose allocator reuses memory."""
    monkeypatch.setattr("ringdp.parallel.pool._SWAPS", swaps)
    monkeypatch.setattr("ringdp.parallel.pool._swap", None)
    pool, tensor = Pool(), torch.empty(BYTES, dtype=torch.uint8, device=device)
    coming = beside(tensor)
    pool.empty(tensor.untyped_storage())
    assert tensor.untyped_storage().nbytes() == 0
    pool.fill(coming.untyped_storage(), BYTES)
    show(coming, tensor)
    assert tensor.untyped_storage().nbytes() == BYTES


@needs_swap
@pytest.mark.process
@on_ranks(2)
def test_what_is_left_of_making_the_units_is_the_memory_of_the_last(comm: Communicator) -> None:
    """Which is the root. Otherwise a sharded model would keep a whole one."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    engine = ringdp.shard(model, stage=3, unit=lambda m: m in model[1:], comm=comm)
    assert [s.nbytes() for s in engine.ledger.pool._kept] == [engine.units[0].bytes]
    engine.close()


class HidesLoss(nn.Module):
    """Puts a loss, which it computes after its output, where the engine does not look."""

    def __init__(self, losses: list[Tensor]) -> None:
        super().__init__()
        self.block, self.hide = block(), losses.append

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.block(x)
        self.hide(self.block(x).sum())
        return y


@needs_swap
@pytest.mark.process
@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_weights_that_are_being_gathered_cannot_be_read(comm: Communicator, stage: int) -> None:
    """The hidden losses' backward begins before that of the units' outputs."""
    losses: list[Tensor] = []
    model = nn.Sequential(*(HidesLoss(losses) for _ in range(2)))
    engine = ringdp.shard(model, stage=stage, comm=comm)
    total = loss(model(batch())) + sum(losses)
    fails = pytest.raises(RuntimeError, match="out of bounds for storage of size 0")
    with fails if stage == 3 else nullcontext():
        total.backward()
    engine.close()
