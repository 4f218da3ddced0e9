"""`batches`: which tensors are copied together."""

from __future__ import annotations

import torch

from ringdp.kernels.batches import SMALL, TOGETHER, batches


def test_small_adjacent_tensors_of_one_dtype_are_batched() -> None:
    a, b, c, d = torch.ones(2, 3), torch.ones(()), torch.ones(4), torch.ones(4).half()
    found = list(batches([a, torch.ones(0), b, c, d, d], [5, 11, 11, 12, 16, 21]))
    assert [(offset, [len(x) for x in batch]) for offset, batch in found] == [
        (5, [6, 1, 4]),
        (16, [4]),  # another dtype
        (21, [4]),  # a gap before it
    ]
    assert found[0][1][0].data_ptr() == a.data_ptr()


def test_large_and_strided_tensors_are_not_batched() -> None:
    large, strided = torch.ones(SMALL + 1, 1), torch.ones(4, 4).t()
    found = list(batches([torch.ones(1), large, strided], [0, 1, SMALL + 2]))
    assert [offset for offset, _ in found] == [0, 1, SMALL + 2]
    assert found[1][1][0] is large
    assert found[2][1][0] is strided


def test_the_size_of_a_batch_is_bounded() -> None:
    count = TOGETHER // SMALL + 1
    tensors = [torch.ones(SMALL) for _ in range(count)]
    found = [len(batch) for _, batch in batches(tensors, [i * SMALL for i in range(count)])]
    assert found == [count - 1, 1]
