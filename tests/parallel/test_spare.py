"""Memory of gathered units goes from one to the next."""

from __future__ import annotations

import pytest
import torch

from ringdp.parallel.spare import _SWAPS, Spare

KEPT = pytest.mark.skipif(not _SWAPS, reason="this torch's storages swap no memory")
BYTES = 1 << 20


def filled(spare: Spare, size: int = BYTES) -> torch.Tensor:
    tensor = torch.empty(0, dtype=torch.uint8)
    spare.fill(tensor.untyped_storage(), size)
    return tensor.set_(tensor.untyped_storage(), 0, (size,))


@KEPT
def test_the_same_memory_comes_back_to_whoever_asks_for_as_much() -> None:
    spare = Spare()
    first, second = filled(spare), filled(spare)
    addresses = {first.data_ptr(), second.data_ptr()}
    for tensor in (first, second):
        spare.empty(tensor.untyped_storage())
    assert {filled(spare).data_ptr(), filled(spare).data_ptr()} <= addresses


def test_an_emptied_storage_has_nothing_and_its_views_see_what_comes_next() -> None:
    spare = Spare()
    tensor = filled(spare)
    view = tensor[8:16]
    spare.empty(tensor.untyped_storage())
    assert tensor.untyped_storage().nbytes() == 0
    spare.fill(tensor.untyped_storage(), BYTES)
    tensor.fill_(3)
    assert view.tolist() == [3] * 8


@KEPT
def test_what_fits_nobody_is_let_go_before_more_is_taken() -> None:
    spare = Spare()
    spare.empty(filled(spare).untyped_storage())
    assert [s.nbytes() for s in spare._kept] == [BYTES]
    filled(spare, BYTES // 2)
    assert spare._kept == []
