"""`address` refuses tensors whose elements are not in memory before C++ or a GPU reads them."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ringdp.kernels import adamw, flatten, squared_norm, stochastic_round, unscale
from ringdp.kernels.adamw import adamw_triton
from ringdp.kernels.address import address
from ringdp.kernels.flatten import flatten_triton
from ringdp.kernels.fold import fold_triton
from ringdp.kernels.norm import squared_norm_triton
from ringdp.kernels.stochastic import stochastic_round_triton
from ringdp.kernels.unscale import unscale_triton
from tests.kernels.test_adamw import FACTORS


def test_address_is_that_of_the_first_element() -> None:
    x = torch.ones(10)
    assert address(x) == x.data_ptr()
    assert address(x[3:]) == x.data_ptr() + 12
    assert address(x[10:]) == 0
    freed = torch.ones(0)
    freed.untyped_storage().resize_(0)
    assert address(freed) == 0  # an empty tensor needs no memory


@pytest.mark.parametrize("left", [12, 0])
def test_freed_and_shortened_storages_are_refused(left: int) -> None:
    x = torch.ones(4)
    x.untyped_storage().resize_(left)
    message = rf"float32\[4\] at element 0 of a storage of {left} bytes is not in memory"
    for norm in (squared_norm, squared_norm_triton):
        with pytest.raises(ValueError, match=message):
            norm([x])
    y, half, found = torch.ones(4), torch.ones(4).bfloat16(), torch.zeros(1)
    for call in (
        lambda: flatten([x], y, offsets=[0]),
        lambda: flatten_triton([x], y, 1.0, [0]),
        lambda: adamw(y, x, y, y, step=1, lr=0.1, betas=(0, 0), eps=0.1, weight_decay=0),
        lambda: adamw_triton(y, x, y, y, None, FACTORS),
        lambda: fold_triton(torch.ones(2, 4), x, torch.float32),
        lambda: unscale(x, y, found, scale=1.0),
        lambda: unscale_triton(x, y, found, 1.0),
        lambda: stochastic_round(x, half, seed=0),
        lambda: stochastic_round_triton(x, half, (0, 0), 0),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_gpu_does_not_take_lazily_negated_tensors_for_what_lies_in_memory() -> None:
    z = torch.tensor([[1 + 2j], [3 + 4j]]).conj()
    with pytest.raises(ValueError, match="lazily negated"):
        fold_triton(z.imag, torch.ones(1), torch.float32)
    with pytest.raises(ValueError, match="lazily negated"):
        flatten_triton([z[0].imag], torch.ones(1), 1.0, [0])


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_fake_tensors_are_refused() -> None:
    with FakeTensorMode():
        x = torch.ones(4)
    with pytest.raises(ValueError, match="or the tensor is fake"):
        address(x)
