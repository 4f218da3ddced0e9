"""The pool that passes the memory of gathered units from one to the next."""

from __future__ import annotations

import pytest
import torch

from ringdp.parallel.pool import _SWAPS, Pool

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
def test_memory_of_another_size_is_freed_before_more_is_allocated() -> None:
    pool = Pool()
    pool.empty(fill(pool).untyped_storage())
    assert [s.nbytes() for s in pool._kept] == [BYTES]
    fill(pool, BYTES // 2)
    assert pool._kept == []
