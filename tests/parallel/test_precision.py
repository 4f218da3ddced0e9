"""Mixed precision compared with casts by hand; and refused combinations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import Communicator, Precision
from ringdp.parallel.precision import Dtypes, dtypes
from ringdp.parallel.values.inputs import cast
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9), nn.Linear(9, 9))


def batch(rank: int) -> Tensor:
    return torch.randn(6, 9, generator=torch.Generator().manual_seed(rank))


def test_dtypes_have_defaults():
    assert dtypes(FLOAT, kept=False, precision=Precision()) == Dtypes(FLOAT, FLOAT, FLOAT)
    assert dtypes(FLOAT, kept=False, precision=Precision(BF16)) == Dtypes(FLOAT, BF16, BF16)
    assert dtypes(FLOAT, kept=False, precision=Precision(BF16, FLOAT)).reduce == FLOAT
    assert dtypes(FLOAT, kept=True, precision=Precision(BF16)) == Dtypes(FLOAT, FLOAT, FLOAT)
    with pytest.raises(ringdp.UsageError, match=r"param=torch.int32"):
        Precision(param=torch.int32)
    with pytest.raises(ringdp.UsageError, match=r"cast_inputs='units'"):
        Precision(cast_inputs="units")  # type: ignore[arg-type]
    with pytest.raises(
        ringdp.UsageError, match=r"keep_fp32\)='LayerNorm': allowed: a module class"
    ):
        Precision(keep_fp32="LayerNorm")  # type: ignore[arg-type]


DOUBLE = torch.float64


@pytest.mark.parametrize(
    ("master", "precision", "why"),
    [
        (FLOAT, Precision(DOUBLE, BF16), "of parameter weight .*float64 to torch.bfloat16 would"),
        (HALF, Precision(DOUBLE, FLOAT), "float64 to torch.float16 would round twice"),
        (DOUBLE, Precision(BF16), "reduced in torch.bfloat16: .* twice; go through torch.float32"),
        (FLOAT, Precision(torch.float8_e5m2), "float8_e5m2 is not supported; both must be"),
    ],
)
def test_unsupported_casts_of_gradients_are_refused_by_shard(master, precision, why):
    with pytest.raises(ringdp.UsageError, match=why):
        ringdp.shard(nn.Linear(2, 2).to(master), stage=1, precision=precision, comm=ringdp.init())


def test_casting_a_cyclic_container_is_refused():
    cyclic: dict[str, object] = {"x": torch.ones(2)}
    cyclic["self"] = [cyclic]
    with pytest.raises(ringdp.UsageError, match="as a dict that holds itself: their tensors"):
        cast(cyclic, torch.bfloat16)


@pytest.mark.parametrize("stage", range(4))
@on_ranks(1)
def test_mixed_precision_equals_casting_by_hand(comm: Communicator, stage: int) -> None:
    """A bfloat16 forward and backward: dtypes on the way, and gradients."""
    model, twin, seen = net(), net(), []
    precision = Precision(BF16, FLOAT, output=FLOAT, keep_fp32=nn.LayerNorm)
    engine = ringdp.shard(model, stage=stage, precision=precision, comm=comm)
    for m in model:
        m.register_forward_pre_hook(lambda m, i: seen.append((m.weight.dtype, i[0].dtype)))
        m.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    out = model(batch(comm.rank))
    assert seen == [(BF16, BF16), BF16, (FLOAT, FLOAT), BF16, (BF16, BF16), BF16]
    assert out.dtype == FLOAT
    out.square().mean().backward()
    first, norm, last = twin
    x = nn.functional.linear(batch(0).to(BF16), first.weight.to(BF16), first.bias.to(BF16))
    x = norm(x.float()).to(BF16)
    x = nn.functional.linear(x, last.weight.to(BF16), last.bias.to(BF16)).float()
    x.square().mean().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.dtype == FLOAT
        assert torch.equal(p.grad.flatten(), q.grad.flatten())
    engine.close()


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(1)
def test_modules_inside_a_float32_module_stay_in_float32(comm: Communicator, stage: int) -> None:
    """A module kept in float32 that contains another kept one, and is a unit."""
    model, seen = nn.Sequential(net(), nn.Linear(9, 9)), []
    precision = Precision(BF16, FLOAT, keep_fp32=lambda m: m is model[0] or m is model[0][1])
    engine = ringdp.shard(model, stage=stage, unit=nn.Linear, precision=precision, comm=comm)
    model[0].register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    for m in model[0]:
        m.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    model(batch(0)).square().mean().backward()
    assert seen == [FLOAT, FLOAT, FLOAT, BF16]
    engine.close()


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_modules_may_have_a_precision_of_their_own(comm: Communicator, stage: int) -> None:
    model, twin, seen = nn.Sequential(net(), net()), nn.Sequential(net(), net()), []
    inner = Precision(BF16, FLOAT, output=DOUBLE)
    precision = {model: Precision(DOUBLE, output=FLOAT), model[0][1]: inner, model[1]: Precision()}
    engine = ringdp.shard(model, stage=stage, unit=nn.Linear, precision=precision, comm=comm)
    for m in (*model[0], *model[1]):
        m.register_forward_pre_hook(lambda m, i: seen.extend((i[0].dtype, m.weight.dtype)))
        m.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    model[0].register_forward_hook(lambda m, i, o: o.float())
    out = model(batch(0))
    assert seen == [*3 * [DOUBLE], BF16, BF16, DOUBLE, *3 * [DOUBLE], *9 * [FLOAT]]
    out.square().mean().backward()
    x = twin[0].double()[0](batch(0).double())
    x = twin[0][2](twin[0][1].to(BF16)(x.to(BF16)).double()).float()
    twin[1](x).square().mean().backward()
    for unit in engine.units[1:] if stage else ():
        for p, of in zip(unit.parameters, unit.plan.entries, strict=True):
            begin, end = unit.plan.parts(of).get(comm.rank, (0, 0))
            whole = twin.get_parameter(of.name).grad.float().flatten()
            assert p.dtype == FLOAT
            assert torch.equal(p.grad, whole[begin:end])
    engine.close()


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([net()])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks[0](x)
        return out


@on_ranks(1)
def test_a_precision_of_a_list_casts_what_its_entries_take_and_return(comm: Communicator) -> None:
    model, seen = Listed(), list[torch.dtype]()
    precision = {model.blocks: Precision(DOUBLE, output=HALF)}
    engine = ringdp.shard(model, stage=3, unit=nn.Linear, precision=precision, comm=comm)
    model.blocks[0].register_forward_pre_hook(lambda m, i: seen.append(i[0].dtype))
    seen.append(model(batch(0)).dtype)
    assert seen == [DOUBLE, HALF]
    engine.close()


@on_ranks(1)
def test_a_precision_within_a_kept_module_holds(comm: Communicator) -> None:
    model, seen = nn.Sequential(net()), []
    around = Precision(BF16, keep_fp32=lambda m: m is model[0])
    precision = {model: around, model[0][1]: Precision(DOUBLE, output=FLOAT)}
    engine = ringdp.shard(model, stage=3, precision=precision, comm=comm)
    for m in model[0]:
        m.register_forward_pre_hook(lambda m, i: seen.append((i[0].dtype, m.weight.dtype)))
    assert model(batch(0)).dtype == BF16
    assert seen == [(FLOAT, FLOAT), (DOUBLE, DOUBLE), (FLOAT, FLOAT)]
    engine.close()


@on_ranks(1)
def test_a_module_in_two_places_has_one_precision(comm: Communicator) -> None:
    """One without parameters may lie in modules of two."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(9, 9)) for _ in range(2)))
    activation, shared = nn.Tanh(), nn.Linear(9, 9)
    given = {model[0]: Precision(DOUBLE, output=FLOAT)}
    for block in model:
        block.append(activation)
    engine = ringdp.shard(model, stage=3, precision=given, comm=comm)
    assert model(batch(0)).dtype == FLOAT
    with engine.full_parameters():
        engine.close()
    for block in model:
        block.append(shared)
    with pytest.raises(
        ringdp.UsageError, match=r"module 1\.2 is part of two .*float64.* or one of"
    ):
        ringdp.shard(model, stage=3, precision=given, comm=comm)
    given[shared] = Precision(cast_inputs=False)
    given[model[0][0]] = Precision(DOUBLE, output=FLOAT)
    engine = ringdp.shard(model, stage=3, precision=given, comm=comm)
    assert model(batch(0)).dtype == FLOAT
    engine.close()


@on_ranks(1)
def test_precisions_of_what_is_no_module_of_the_model_are_refused(comm: Communicator) -> None:
    model = net()
    for wrong in ({nn.ReLU(): Precision(BF16)}, {model[0]: BF16}, {"0": Precision(BF16)}):
        with pytest.raises(ringdp.UsageError, match="allowed in a dict: modules of the model, and"):
            ringdp.shard(model, stage=3, precision=wrong, comm=comm)  # type: ignore[arg-type]
    model[2].weight = model[0].weight
    with pytest.raises(ringdp.UsageError, match=r"of 2 is tied .* one precision for both"):
        ringdp.shard(model, stage=3, precision={model[0]: Precision(BF16)}, comm=comm)


@pytest.mark.parametrize("persist_below", [0, 999])
@on_ranks(1)
def test_inputs_of_blocks_whose_parameters_are_the_roots_are_cast(
    comm: Communicator, persist_below: int
) -> None:
    """The first two blocks are tied; with persist_below the root has those of the last, too."""
    model, seen = nn.Sequential(*(nn.Linear(9, 9) for _ in range(3)), nn.Softplus()), []
    model[1].weight, model[1].bias = model[0].parameters()
    engine = ringdp.shard(
        model, stage=3, precision=Precision(BF16), persist_below=persist_below, comm=comm
    )
    for m in model:
        m.register_forward_hook(lambda m, i, o: seen.append(i[0].dtype) or o.float())
    model(batch(0)).sum().backward()
    assert seen == [BF16, BF16, BF16, FLOAT]
    engine.close()


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_batch_norm_whose_buffers_have_another_dtype_is_refused(
    comm: Communicator, stage: int
) -> None:
    model, x = nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9)), batch(0)
    engine = ringdp.shard(model, stage=stage, precision=Precision(BF16, output=FLOAT), comm=comm)
    for mode in (True, False):
        model.train(mode)
        with pytest.raises(
            ringdp.UsageError, match=r"batch norm 1 .* of ringdp\.shard's Precision"
        ):
            model(x)
    with engine.full_parameters():
        model(x)
    norm: Any = model[1]
    norm.running_mean, norm.running_var = norm.running_mean.bfloat16(), norm.running_var.bfloat16()
    for mode in (True, False):
        model.train(mode)
        model(x).sum().backward()
    engine.close()


class Float32Norm(nn.BatchNorm1d):
    """Casts what it computes with."""

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weight.float(), self.bias.float()
        mean, variance = self.running_mean, self.running_var
        y = nn.functional.batch_norm(x.float(), mean, variance, *weights, training=self.training)
        return y.to(x.dtype)


@on_ranks(1)
def test_a_batch_norm_may_cast_its_weights_to_the_dtype_of_its_buffers(comm: Communicator) -> None:
    model = nn.Sequential(nn.Linear(9, 9), Float32Norm(9))
    engine = ringdp.shard(model, stage=3, precision=Precision(BF16), comm=comm)
    model(batch(0)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    engine.close()


@on_ranks(2)
def test_a_sync_batch_norm_computes_in_the_dtype_of_its_buffers(comm: Communicator) -> None:
    """In training and in evaluation."""
    norm: Any = ringdp.SyncBatchNorm(9, process_group=comm)
    plain = nn.BatchNorm1d(9)
    engine = ringdp.shard(norm, stage=3, precision=Precision(BF16), comm=comm)
    x = batch(0).bfloat16()
    norm(x).sum().backward()
    for mine, theirs in zip(norm.buffers(), plain.buffers(), strict=True):
        theirs.copy_(mine)
    assert torch.equal(norm.eval()(x), plain.eval()(x))
    engine.close()


def test_a_weight_tied_across_dtypes_is_refused():
    model = nn.Sequential(nn.Embedding(9, 9), nn.Linear(9, 9, bias=False))
    model[1].weight = model[0].weight
    precision = Precision(BF16, keep_fp32=nn.Linear)
    with pytest.raises(ringdp.UsageError, match="a parameter of 1 is tied to one"):
        ringdp.shard(model, stage=3, precision=precision, comm=ringdp.init())
