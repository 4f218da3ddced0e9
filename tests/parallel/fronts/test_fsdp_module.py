"""What modules ask for after `fully_shard`: unshard, reshard, prefetching, and when to reduce."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from ringdp import Communicator, UsageError
from ringdp.parallel import fronts
from ringdp.parallel.state import State
from tests.parallel.fronts.scripts import Scaled, ours_and_torchs
from tests.parallel.small import batch, loss, net
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


@on_ranks(1)
def test_what_modules_ask_for_later_is_checked(comm: Communicator) -> None:
    model: Any = net()
    fronts.fully_shard([*model], comm=comm, reshard_after_forward=False)
    with pytest.raises(UsageError, match="nothing is freed; leave it out in one"):
        model[0].set_reshard_after_forward(True)
    with pytest.raises(UsageError, match=r"\(3\): allowed: True or False"):
        model[0].set_reshard_after_forward(3)
    for wrong in (0, float("nan"), "2", None):
        with pytest.raises(UsageError, match="allowed: a number but 0"):
            model[0].set_gradient_divide_factor(wrong)
    model[0].engine.close()


@on_ranks(1)
def test_no_sync_holds_whatever_modules_ask_for_within(comm: Communicator) -> None:
    model: Any = net()
    for module in (*model, model):
        fronts.fully_shard(module, comm=comm)
    with model.engine.no_sync():
        model.set_reshard_after_forward(False)
        model[0].set_gradient_divide_factor(2.0)
        loss(model).backward()
    with pytest.raises(UsageError, match="have not been reduced"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.engine.close()


def accumulate(comm: Communicator, shards: Any) -> list[float]:
    """A script that prefetches two blocks and accumulates gradients."""
    model: Any = net()
    for block in (*model, model):
        shards(block)
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    model[2].set_modules_to_backward_prefetch([model[1]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        model.set_is_last_backward(step % 2 == 1)
        model.set_reshard_after_backward(step % 2 == 1)
        model.set_requires_gradient_sync(step % 2 == 1)
        model[step % 3].set_requires_gradient_sync(True)
        model.set_requires_all_reduce(step % 2 == 1)
        (value := loss(model, 2 * step + comm.rank)).backward()
        losses.append(value.item())
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    if hasattr(model, "engine"):
        sizes = [u.bytes for u in model.engine.units]
        assert model.engine.gathering.limit == sum(sizes[-2:])
        with pytest.raises(UsageError, match="fully_shard has not sharded Linear"):
            model[0].set_modules_to_forward_prefetch([model[0][0]])
        model.engine.close()
    return losses


@on_ranks(2)
def test_prefetching_and_accumulation_train_as_with_torchs(comm: Communicator) -> None:
    ours, torchs = ours_and_torchs(comm, partial(accumulate, comm))
    assert ours == pytest.approx(torchs)


def unshard_and_train(comm: Communicator, shards: Any, *, frees: bool) -> list[Any]:
    """Gathers before forwards, uses a weight outside of a forward, and frees after evaluation."""
    model: Any = net()
    for block in (*model, model):
        shards(block, reshard_after_forward=frees)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found: list[Any] = []
    for step in range(3):
        model.unshard()
        handle = model[0].unshard(async_op=True)
        model[1].unshard(async_op=True)  # not waited for here; the forward waits
        handle.wait()
        found.append(model[0][0].weight.detach().clone())
        model[0].reshard()
        value = loss(model, 2 * step + comm.rank)
        model[2].unshard()
        penalty = model[2][0].weight.square().sum()
        model.reshard()
        (value + penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found += [value.item(), loss(model, step).item()]
            model.unshard()
            for block in (*model, model):
                block.reshard()
    if hasattr(model, "engine"):
        assert all(u.state is State.SHARDED for u in model.engine.units)
        weight = model[1][0].weight
        model[1].unshard()
        before = weight.detach().clone()
        model[1].reshard()
        handle = model[1].unshard(async_op=True)
        with torch.no_grad():
            weight += 1  # this rank's slice of it
        handle.wait()
        assert torch.equal(weight, before + 1)
        model[1].reshard()
        handle.wait()
        assert weight.shape != before.shape, "wait() gathered it again"
        model.unshard()
        model[1].unshard()
        with torch.no_grad():
            model[1][0].bias.zero_()
        if frees:
            with pytest.raises(UsageError, match=r"written to while .*: 1\.0\.bias"):
                model[1].reshard()
        model.engine.close()
    return found


@pytest.mark.parametrize("frees", [True, False])
@on_ranks(2)
def test_unshard_and_reshard_train_as_with_torchs(comm: Communicator, frees: bool) -> None:
    script = partial(unshard_and_train, comm, frees=frees)
    torch.testing.assert_close(*ours_and_torchs(comm, script))


@on_ranks(2)
def test_what_was_resharded_is_gathered_ahead_again(comm: Communicator) -> None:
    model: Any = Scaled()
    for module in (*model.blocks, model):
        fronts.fully_shard(module, comm=comm)
    out = model(batch())
    last = model.engine.units[-1]
    assert last.state is State.GATHERING  # still, for its backward
    model.blocks[-1].reshard()
    found = []
    out.register_hook(lambda _: found.append(last.state))  # after the root's backward has begun
    out.sum().backward()
    assert found == [State.GATHERING]
    model.engine.close()
