"""Methods that torch's `register_fsdp_forward_method` makes forwards of `fully_shard`ed modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, register_fsdp_forward_method

from ringdp import Communicator
from ringdp.parallel import fronts
from ringdp.parallel.state import State
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.fails = False

    def features(self, x: Tensor, *, scale: Tensor) -> Tensor:
        self.took = x.dtype, scale.dtype
        if self.fails:
            raise ArithmeticError
        return self.inner(x).tanh() * scale

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x, scale=x.mean()) + self.inner(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder.features(x, scale=x.sum()) + self.encoder(x))

    @torch.no_grad()
    def generate(self, x: Tensor) -> Tensor:
        return self(x) + self(self.encoder(x))


def sharded(comm: Communicator, **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = Model()
    for module in (model.encoder, model):
        fronts.fully_shard(module, comm=comm, **options)
    register_fsdp_forward_method(model.encoder, "features")
    register_fsdp_forward_method(model, "generate")
    return model


@pytest.mark.parametrize("frees", [True, False])
@on_ranks(2)
def test_they_gather_and_train(comm: Communicator, frees: bool) -> None:
    model = sharded(comm, reshard_after_forward=frees)
    torch.manual_seed(0)
    plain = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * step + comm.rank))
        torch.testing.assert_close(model.generate(x), plain.generate(x))
        if step == 1:
            model.encoder.fails = True
            with pytest.raises(ArithmeticError):
                model(x)
            model.encoder.fails = False
        for each in (model, plain):
            (each(x).square().mean() + each.encoder.features(x, scale=x.sum()).mean()).backward()
        optimizer.step()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert q.grad is not None
            comm.all_reduce(q.grad, op="avg")
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
            q.data -= 0.1 * q.grad
        model.zero_grad()
        plain.zero_grad()
    assert all(unit.state is State.SHARDED for unit in model.engine.units)
    model.engine.close()


@on_ranks(1)
def test_their_arguments_and_outputs_are_cast(comm: Communicator) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
    model = sharded(comm, mp_policy=policy)
    out = model.encoder.features(torch.ones(2, 6), scale=torch.ones(2, 6))
    assert model.encoder.took == (torch.bfloat16, torch.bfloat16)
    assert out.dtype == torch.float64
    out.sum().backward()
    model.engine.close()
