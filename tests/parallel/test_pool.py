"""Memory of gathered units goes from one to the next."""

from __future__ import annotations

import pytest
import torch

from ringdp.parallel.pool import _SWAPS, Pool

KEPT = pytest.mark.skipif(not _SWAPS, reason="this torch's storages swap no memory")
BYTES = 1 << 20


def filled(pool: Pool, size: int = BYTES) -> torch.Tensor:
    tensor = torch.empty(0, dtype=torch.uint8)
    pool.fill(tensor.untyped_storage(), size)
    return tensor.set_(tensor.untyped_storage(), 0, (size,))


@KEPT
def test_the_same_memory_comes_back_to_whoever_asks_for_as_much() -> None:
    pool = Pool()
    first, second = filled(pool), filled(pool)
    addresses = {first.data_ptr(), second.data_ptr()}
    for tensor in (first, second):
        pool.empty(tensor.untyped_storage())
    assert {filled(pool).data_ptr(), filled(pool).data_ptr()} <= addresses


def test_an_emptied_storage_has_nothing_and_its_views_see_what_comes_next() -> None:
    pool = Pool()
    tensor = filled(pool)
    view = tensor[8:16]
    pool.empty(tensor.untyped_storage())
    assert tensor.untyped_storage().nbytes() == 0
    pool.fill(tensor.untyped_storage(), BYTES)
    tensor.fill_(3)
    assert view.tolist() == [3] * 8


@KEPT
def test_what_fits_nobody_is_let_go_before_more_is_taken() -> None:
    pool = Pool()
    pool.empty(filled(pool).untyped_storage())
    assert [s.nbytes() for s in pool._kept] == [BYTES]
    filled(pool, BYTES // 2)
    assert pool._kept == []
