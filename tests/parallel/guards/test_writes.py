"""Writing to full parameters: between steps, during a forward, and before a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import ringdp
from ringdp import Communicator, Precision, UsageError
from tests.parallel.small import (
    WIDTH,
    assert_equal,
    assert_gradients,
    assert_trains,
    batch,
    loss,
    net,
    whole_parameters,
    with_and_without_precision,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


@with_and_without_precision
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_only_writes_with_write_true_are_kept(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    model = net()
    engine = ringdp.shard(model, stage=stage, precision=precision, comm=comm)
    with engine.full_parameters(write=True), torch.no_grad():
        ones = torch.ones_like(parameters_to_vector(model.parameters()))
        vector_to_parameters(ones, model.parameters())  # assigns p.data
        assert model(batch()).dtype == torch.float32  # of the masters, without casts
    assert all((p == 1).all() for p in whole_parameters(engine))
    optimizer = torch.optim.SGD(model.parameters())
    with engine.full_parameters():
        with pytest.raises(UsageError, match=r"load_state_dict .* within full_parameters\(write"):
            model.load_state_dict(net().state_dict())
        with pytest.raises(UsageError, match="optimizer steps within full_parameters"):
            optimizer.step()
        for p in model.parameters():
            p.data.zero_()
    assert all((p == 1).all() for p in whole_parameters(engine))
    for call in (model[0].state_dict, lambda: model[0].load_state_dict(net()[0].state_dict())):
        if stage:
            with pytest.raises(UsageError, match="of a sharded model"):
                call()
        else:
            call()
    with engine.full_parameters(), engine.full_parameters(write=True):
        model.load_state_dict(net(1).state_dict())
    assert_equal(engine, net(1))
    with engine.full_parameters(write=True):
        backup = [p.data for p in model.parameters()]
        for p in model.parameters():
            p.data = torch.zeros_like(p)
    with engine.full_parameters(write=True):
        for p, values in zip(model.parameters(), backup, strict=True):
            assert not p.any()
            p.data = values
    assert_equal(engine, net(1))
    engine.close()


class WritesInForward(nn.Sequential):
    """Its forward writes to a weight, by `how`."""

    how: Callable[[nn.Parameter], object] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.how:
            with torch.no_grad():
                self.how(self[0].weight)
        return super().forward(x)


def assign(p: nn.Parameter) -> None:
    p.data = p.data.clamp(min=0)


@with_and_without_precision
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_a_write_during_a_forward_is_kept_or_refused(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    def make() -> WritesInForward:
        torch.manual_seed(0)
        return WritesInForward(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    model, twin = make(), make()
    engine = ringdp.shard(model, stage=stage, unit=1 << 40, precision=precision, comm=comm)
    for how in (lambda p: p.clamp_(min=0), lambda p: p.data.mul_(0.5), assign):
        model.how = how
        if how is not assign and stage < 3 and not precision:
            twin.how = how  # kept, and right if all ranks write the same
            for one in (model, twin):
                loss(one).backward()
                one.zero_grad()
            twin.how = None
        else:
            with pytest.raises(
                UsageError, match=r"written to while its unit computes: 0\.weight\."
            ):
                loss(model).backward()
    model.how = None
    assert_trains(engine, twin)
    engine.close()


class Momentum(nn.Module):
    """Its forward averages the first block's weights into the last's, by `how`."""

    def __init__(self, how: Callable[[nn.Parameter, nn.Parameter], object]) -> None:
        super().__init__()
        self.blocks, self.how = nn.ModuleList(net().children()), how
        self.blocks[-1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            first, last = self.blocks[0].parameters(), self.blocks[-1].parameters()
            for pair in zip(last, first, strict=True):
                self.how(*pair)
        for block in self.blocks:
            x = block(x)
        return x


def average(p: nn.Parameter, q: nn.Parameter) -> None:
    p.lerp_(q, 0.5)


def assign_average(p: nn.Parameter, q: nn.Parameter) -> None:
    p.data = p.data * 0.5 + q.data * 0.5


def assign_bias(p: nn.Parameter, q: nn.Parameter) -> None:
    """Which lies on one rank: the others must gather its unit again, too."""
    if p.dim() == 1:
        assign_average(p, q)


@with_and_without_precision
@pytest.mark.parametrize("how", [average, assign_average, assign_bias])
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_units_that_are_gathered_ahead_get_what_a_forward_writes(
    comm: Communicator,
    stage: int,
    how: Callable[[nn.Parameter, nn.Parameter], object],
    precision: Precision | None,
) -> None:
    model, twin = Momentum(how), Momentum(how)
    engine = ringdp.shard(
        model, stage=stage, precision=precision, comm=comm, prefetch_bytes=1 << 30
    )
    for one in (model, twin):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for seed in range(3):
            loss(one, seed).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(engine, twin)
    engine.close()


@on_ranks(2)
def test_a_backward_that_wrote_leaves_no_bucket(comm: Communicator) -> None:
    """It raises while the root's is filled, and again when the next forward reshards."""
    model, twin = net(), net()
    engine = ringdp.shard(model, stage=3, unit=lambda m: m in (model[0], model[2]), comm=comm)

    @torch.no_grad()
    def write(_: nn.Parameter) -> None:
        for block in model:
            block[0].bias.mul_(1)

    handle = model[2][0].bias.register_post_accumulate_grad_hook(write)
    with pytest.raises(UsageError, match="written to while its unit computes"):
        loss(model).backward()
    handle.remove()
    with suppress(UsageError):
        loss(model)
    for one in (model, twin):
        loss(one).backward()
    assert_gradients(engine, twin)
    assert engine.ledger.now["buckets"] == 0
    engine.close()


class WritesAmid(nn.Module):
    """Writes to a parameter in the backward of a gradient that its forward computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        h = x.requires_grad_()

        @torch.no_grad()
        def write(*_: object) -> None:
            self.inner[0].bias.mul_(2)

        handle = self.inner[0].register_forward_hook(
            lambda _m, _x, out: out.register_hook(write) and None
        )
        out = self.inner(h)
        handle.remove()
        (by_input,) = torch.autograd.grad(out.sum(), h)
        return by_input


@with_and_without_precision
@on_ranks(2)
def test_a_backward_amid_a_forward_that_wrote_is_refused(
    comm: Communicator, precision: Precision | None
) -> None:
    torch.manual_seed(0)
    engine = ringdp.shard(
        model := WritesAmid(), stage=3, unit=nn.Sequential, precision=precision, comm=comm
    )
    with pytest.raises(UsageError, match=r"written to while its unit computes: inner\.0\.bias"):
        model(batch())
    engine.close()


@with_and_without_precision
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_blocks_called_directly_use_written_values(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    """As when averaged weights are swapped in to evaluate parts of a model."""
    engine = ringdp.shard(model := net(), stage=stage, precision=precision, comm=comm)
    loss(model).backward()
    model.zero_grad()
    masters = list(model.parameters())
    x = batch()
    with torch.no_grad():
        for value, write in (
            (1, lambda p: p.fill_(1)),
            (2, lambda p: p.data.fill_(2)),
            (3, lambda p: setattr(p, "data", torch.full_like(p, 3))),
        ):
            model[0](x)
            for p in masters:
                write(p)
            for block in model.children():
                exact = torch.tanh(value * (1 + x.sum(1, keepdim=True))).expand_as(x)
                torch.testing.assert_close(block(x), exact, check_dtype=False)
        counts = [engine.sent_bytes()]
        for blocks in ([model], model.children()):
            for block in blocks:
                block(x)
            counts.append(engine.sent_bytes())
    assert counts[1] - counts[0] == counts[2] - counts[1]  # nothing is gathered needlessly
    assert len(engine.gathering._seen) <= len(engine.units)
    engine.close()


@with_and_without_precision
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_assigned_data_can_be_evaluated_before_training(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    """Memory allocated in inference mode cannot be used by autograd."""
    model, twin = net(), net()
    engine = ringdp.shard(model, stage=stage, precision=precision, comm=comm)
    held: list[object] = []  # keeps memory alive, so that stage 3 takes other memory
    for one in (model, twin):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for p in one.parameters():
            p.data = p.data * 0.5
        look = one[0][0].register_forward_hook(lambda m, *_: held.append(m.weight.data.numpy()))
        with torch.inference_mode():
            one(batch())
        look.remove()
        loss(one).backward()
        optimizer.step()
    assert_equal(engine, twin)
    engine.close()


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_checkpoint_has_assigned_data(comm: Communicator, tmp_path: Path, stage: int) -> None:
    model = net()
    engine = ringdp.shard(model, stage=stage, comm=comm)
    for p in model.parameters():
        p.data = torch.ones_like(p)
    ringdp.save(tmp_path, engine)
    for p in model.parameters():
        p.data = torch.zeros_like(p)
    ringdp.load(tmp_path, engine)
    assert all((p == 1).all() for p in whole_parameters(engine))
    engine.close()


@with_and_without_precision
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_full_parameters_without_memory_leave_the_model_sharded(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    """Otherwise the model would count as whole, and a state_dict would have slices."""
    engine = ringdp.shard(model := net(), stage=stage, precision=precision, comm=comm)
    *_, last = engine.units

    def none_left(*_: object) -> None:
        raise MemoryError

    last.cut.whole, whole = none_left, last.cut.whole  # type: ignore[method-assign]
    with pytest.raises(MemoryError), engine.full_parameters(write=True):
        raise AssertionError("it was entered")
    last.cut.whole = whole  # type: ignore[method-assign]
    if stage:
        with pytest.raises(UsageError, match="state_dict of a sharded model"):
            model.state_dict()
        with pytest.raises(UsageError, match="outside the forward of its unit"):
            model[2][0].weight.sum()
    assert_trains(engine, net())
    engine.close()
