"""What an engine cannot do is refused before it goes wrong, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import ringdp
from ringdp import Communicator
from tests.parallel.loop_models import WIDTH, Checkpointed, batch, block, linear, loss, net
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


class Opaque(nn.Module):
    """Its output cannot be searched for tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block()])
        self.last = linear()

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        return iter([self.last(self.blocks[0](x))])


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_unsupported_models_and_calls_are_refused(comm: Communicator, stage: int) -> None:
    """`message` is None where the stage allows the use."""

    def opaque() -> None:
        next(net_of(Opaque())(batch())).sum().backward()

    def twice_reentrant() -> None:
        b = block()
        model = net_of(Checkpointed(b, b, reentrant=True))
        loss(model(batch())).backward()

    def within() -> None:
        model = net_of(net())
        with engines[-1].full_parameters():
            loss(model(batch())).backward()

    def second_order() -> None:
        model = net_of(net())
        x = batch().requires_grad_()
        (g,) = torch.autograd.grad(loss(model(x)), x, create_graph=True)
        (loss(model(x)) + g.square().sum()).backward()

    def with_weight_norm() -> None:
        model = net_of(nn.Sequential(weight_norm(linear())))
        with torch.no_grad():
            model[0].weight  # noqa: B018, which a parametrization makes

    def step(engine: ringdp.Engine) -> None:
        torch.optim.SGD(engine.model.parameters(), lr=0.1).step()

    def clip(engine: ringdp.Engine) -> None:
        ringdp.clip_grad_norm_(engine, 1.0)

    def gather(engine: ringdp.Engine) -> None:
        with engine.full_parameters():
            pass

    def save(engine: ringdp.Engine) -> None:
        ringdp.save("checkpoint", engine)

    def within_backward(act: Callable[[ringdp.Engine], None]) -> None:
        model = net_of(net())
        next(model.parameters()).register_post_accumulate_grad_hook(lambda _: act(engines[-1]))
        loss(model(batch())).backward()

    def after_closing() -> None:
        value = loss(net_of(net())(batch()))
        engines[-1].close()
        value.backward()

    def sparse() -> None:
        model = net_of(nn.Sequential(nn.Embedding(5, WIDTH, sparse=True)))
        model(torch.tensor([1, 2])).sum().backward()

    engines: list[ringdp.Engine] = []

    def net_of(model: Any) -> Any:
        engines.append(ringdp.shard(model, stage=stage, comm=comm))
        return model

    for attempt, message in (
        (opaque, "unit '' returns an iterator" if stage == 3 else None),
        (twice_reentrant, "Pass use_reentrant=False"),
        (within, "full_parameters"),
        (second_order, "create_graph" if stage == 3 else None),
        (with_weight_norm, "outside the forward of its unit" if stage else None),
        (lambda: within_backward(step), "the optimizer steps within backward"),
        (lambda: within_backward(clip), "gradients are clipped or scaled within backward"),
        (lambda: within_backward(gather), r"full_parameters\(\) is entered within backward"),
        (lambda: within_backward(save), "a checkpoint is saved or loaded within backward"),
        (after_closing, "closed, or aborted, before a backward ended"),
        (sparse, r"parameter 0\.weight got a sparse gradient"),
    ):
        with pytest.raises(ringdp.RingdpError, match=message) if message else nullcontext():
            attempt()
        engines.pop().close()


def disagree(comm: Communicator, stage: int) -> str:
    """Rank 0 uses block 1, the others do not."""
    model = net()
    engine = ringdp.shard(model, stage=stage, comm=comm)
    if comm.rank:
        model.blocks = nn.ModuleList([model.blocks[0], model.blocks[2]])
    try:
        for _ in range(2):
            loss(model(batch())).backward()
    except ringdp.RingdpError as e:
        return f"{type(e).__name__}: {e}"
    finally:
        with suppress(ringdp.CommunicationError):  # the failure of the others may be noticed here
            engine.close()
    return ""


@pytest.mark.parametrize("stage", range(4))
def test_ranks_that_use_different_units_are_a_mismatch(fresh_ranks, stage):
    message = fresh_ranks(2)(disagree, stage)
    assert all(message)
    wrong = next(text for text in message if "CollectiveMismatch" in text)
    assert "(unit blocks.1)" in wrong
    assert "let what differs by rank, such as experts, lie in one unit" in wrong
