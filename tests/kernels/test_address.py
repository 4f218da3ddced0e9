"""address: what has no memory is refused before C++ reads it."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ringdp.kernels import adamw, squared_norm
from ringdp.kernels.address import address


def test_is_that_of_the_first_element() -> None:
    x = torch.ones(10)
    assert address(x) == x.data_ptr()
    assert address(x[3:]) == x.data_ptr() + 12
    assert address(x[10:]) == 0
    freed = torch.ones(0)
    freed.untyped_storage().resize_(0)
    assert address(freed) == 0  # nothing is asked of it


@pytest.mark.parametrize("left", [0, 12])
def test_freed_or_cut(left: int) -> None:
    x = torch.ones(4)
    x.untyped_storage().resize_(left)
    with pytest.raises(
        ValueError, match=rf"float32\[4\] at element 0 of a storage of {left} bytes"
    ):
        squared_norm([x])
    with pytest.raises(ValueError, match="is not in memory"):
        adamw(
            torch.ones(4), x, torch.ones(4), torch.ones(4),
            step=1, lr=0.1, betas=(0.9, 0.9), eps=1e-8, weight_decay=0.0,
        )  # fmt: skip


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_fake() -> None:
    with FakeTensorMode():
        x = torch.ones(4)
    with pytest.raises(ValueError, match="or the tensor is fake"):
        address(x)
