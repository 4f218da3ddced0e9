"""DistributedDataParallel's mixed_precision has the bits of torch's over gloo in float32 gradients,
parameters and buffers, at 2 ranks."""

from __future__ import annotations

import copy
import gc
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.hooks import RemovableHandle

from ringdp import Communicator, DistributedDataParallel, UsageError
from tests.equal import equal
from tests.parallel.ddp.cases import (
    CASES,
    TORCHS,
    WIDTH,
    Transformer,
    backward,
    error_text,
    gloo,
    loss,
    mlp,
    rows,
    train,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16


class Mix(NamedTuple):
    case: str
    dtypes: tuple[torch.dtype | None, ...]  # of parameters, reductions, buffers


MIXES = [
    Mix("mlp", (BFLOAT, FLOAT, None)),
    Mix("mlp", (BFLOAT, None, None)),
    Mix("mlp", (HALF, HALF, HALF)),
    Mix("mlp", (HALF, BFLOAT, None)),
    Mix("mlp, a bucket each", (BFLOAT, FLOAT, None)),
    Mix("mlp, zeroed in place", (BFLOAT, FLOAT, None)),
    Mix("accumulated reduced", (BFLOAT, FLOAT, None)),
    Mix("cnn with batch norm", (BFLOAT, FLOAT, BFLOAT)),
    Mix("checkpoint", (BFLOAT, FLOAT, None)),
]


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: f"{mix.case}, {mix.dtypes}")
@on_ranks(2)
def test_bits_equal_torchs(comm: Communicator, mix: Mix) -> None:
    """Works around limits of torch's class on the CPU.

    It waits for copies on streams and by events, which the CPU does not have. Its first backward
    reads uninitialised memory (2.13: bucket views made before the dtype changes), so one backward
    is run before. It supports neither no_sync nor tied parameters, and gradient_as_bucket_view only
    after one more backward.
    """
    gloo()
    case, config = CASES[mix.case], _MixedPrecision(*mix.dtypes)
    case = case._replace(options=case.options | {"mixed_precision": config})

    def torchs(model: nn.Module, **options: Any) -> nn.Module:
        net = TORCHS(model, **options)
        state = copy.deepcopy(net.state_dict())
        case.step(net, 0, comm.rank)
        net.zero_grad()
        net.load_state_dict(state)
        return net

    gradients, states = train(case, DistributedDataParallel, comm.rank)
    with (
        patch.multiple(torch, Stream=MagicMock, Event=MagicMock),
        patch.object(torch.accelerator, "current_stream", MagicMock()),
    ):
        theirs, expected = train(case, torchs, comm.rank)
    for mine, other in zip(gradients, theirs, strict=True):
        assert mine is not None
        assert mine.dtype == FLOAT
        assert torch.equal(mine, other)
    for mine, other in zip(states, expected, strict=True):
        # torch's also casts counters among the buffers
        assert mine.dtype == other.dtype or not mine.is_floating_point()
        assert torch.equal(mine.double(), other.double())


class DtypeRecorder(nn.Linear):
    """Records the dtypes that it computes with."""

    def forward(self, x: Tensor) -> Tensor:
        self.dtypes_seen = x.dtype, self.weight.dtype
        return super().forward(x)


@on_ranks(2)
def test_parameters_are_low_precision_only_between_forward_and_backward(comm: Communicator) -> None:
    """Both for parameters with a low precision and for those without."""
    net: Any = DistributedDataParallel(
        nn.Sequential(DtypeRecorder(WIDTH, 4), DtypeRecorder(4, 3).requires_grad_(False)),
        process_group=comm,
        mixed_precision=_MixedPrecision(BFLOAT, FLOAT),
    )
    before = [p.detach().clone() for p in net.parameters()]
    pointers = [p.data_ptr() for p in net.parameters()]

    def at_rest() -> bool:
        same = zip(net.parameters(), before, pointers, strict=True)
        return all(torch.equal(p, b) and p.data_ptr() == at for p, b, at in same)

    for without in (torch.no_grad, torch.inference_mode):
        with without():
            net(rows(0, comm.rank))
        assert at_rest()
    assert net.module[0].dtypes_seen == net.module[1].dtypes_seen == (BFLOAT, BFLOAT)
    out = net(rows(1, comm.rank))
    assert {p.dtype for p in net.parameters()} == {out.dtype} == {BFLOAT}
    with torch.no_grad():  # between a forward and its backward
        net(rows(2, comm.rank))
    loss(out).backward()
    assert at_rest()
    with net.no_sync():
        loss(net(rows(3, comm.rank))).backward()
    trained = net.module[0]
    assert trained.weight.dtype == trained.weight.grad.dtype == FLOAT
    loss(net(rows(4, comm.rank))).backward()
    assert at_rest()


@on_ranks(2)
def test_tied_parameters_stay_tied(comm: Communicator) -> None:
    """Compared with a model in bfloat16 on every rank, whose gradients are averaged in float32."""
    torch.manual_seed(0)
    net: Any = DistributedDataParallel(
        Transformer(), process_group=comm, mixed_precision=_MixedPrecision(BFLOAT, FLOAT)
    )
    for step in range(2):
        local = copy.deepcopy(net.module).bfloat16()
        net.zero_grad()
        with net.no_sync():
            loss(net(rows(step, comm.rank, 0))).backward()
        loss(net(rows(step, comm.rank, 1))).backward()
        for part in range(2):
            loss(local(rows(step, comm.rank, part).bfloat16())).backward()
        for mine, other in zip(net.parameters(), local.parameters(), strict=True):
            expected = other.grad.float()
            comm.all_reduce(expected)
            assert torch.equal(mine.grad, expected / comm.size)
            mine.data.sub_(mine.grad, alpha=0.05)
        assert net.module.head.weight is net.module.embed.weight
        assert net.module.head.weight.dtype == FLOAT


def gradients(comm: Communicator, config: _MixedPrecision, **options: Any) -> list[Tensor]:
    """The gradients of the second of two backwards."""
    torch.manual_seed(0)
    net = DistributedDataParallel(mlp(), process_group=comm, mixed_precision=config, **options)
    backward(net, 0, comm.rank)
    return backward(net, 0, comm.rank)


@on_ranks(2)
def test_reductions_alone_can_be_low_precision(comm: Communicator) -> None:
    """torch's raises here. The result is the sum of bfloat16 gradients, halved."""
    found = gradients(comm, _MixedPrecision(reduce_dtype=BFLOAT))
    torch.manual_seed(0)
    local = mlp()
    loss(local(rows(0, comm.rank))).backward()
    for mine, p in zip(found, local.parameters(), strict=True):
        assert p.grad is not None
        total = p.grad.bfloat16()
        comm.all_reduce(total)
        assert torch.equal(mine, (total / 2).float())
        assert not torch.equal(mine, p.grad)


@on_ranks(2)
def test_bucket_views_hold_the_same_gradients(comm: Communicator) -> None:
    config = _MixedPrecision(BFLOAT, HALF)
    views = gradients(comm, config, gradient_as_bucket_view=True)
    assert equal(gradients(comm, config), views)


@on_ranks(2)
def test_unsupported_combinations_are_refused(comm: Communicator) -> None:
    def wrap(config: Any, model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, process_group=comm, mixed_precision=config)

    low = _MixedPrecision(BFLOAT)
    sparse = nn.Sequential(nn.Embedding(3, 2, sparse=True))
    hooked = wrap(low, mlp())
    text = error_text(lambda: wrap(BFLOAT, mlp()), UsageError)
    assert "mixed_precision is torch.bfloat16" in text
    assert "_MixedPrecision" in text
    assert "0.weight gets sparse gradients" in error_text(lambda: wrap(low, sparse), UsageError)
    wrap(low, nn.ModuleDict({"sparse": mlp(), "frozen": sparse.requires_grad_(False)}))
    assert "once" in error_text(lambda: hooked.register_comm_hook(None, print))


@on_ranks(2)
def test_every_forward_adds_hooks_and_none_stay(comm: Communicator) -> None:
    """A parameter that is cast has another gradient accumulator in every iteration."""
    config = _MixedPrecision(param_dtype=BFLOAT)
    net: Any = DistributedDataParallel(mlp(), process_group=comm, mixed_precision=config)

    def handles() -> int:
        loss(net(rows(0, comm.rank))).backward()
        gc.collect()
        return sum(type(o) is RemovableHandle for o in gc.get_objects())

    handles()
    before = handles()
    assert handles() == before


class Batch(list[Tensor]):
    def __copy__(self) -> Batch:
        raise ZeroDivisionError


@on_ranks(1)
def test_a_failing_input_cast_leaves_no_active_forward(comm: Communicator) -> None:
    config = _MixedPrecision(param_dtype=torch.bfloat16)
    net: Any = DistributedDataParallel(mlp(), process_group=comm, mixed_precision=config)
    with pytest.raises(ZeroDivisionError):
        net(Batch([rows(0, comm.rank)]))
    assert TORCHS._get_active_ddp_module() is None


@pytest.mark.parametrize("outside", [True, False])
@on_ranks(2)
def test_compiled_gradients_are_the_same(comm: Communicator, outside: bool) -> None:
    """Either the whole wrapper is compiled, or the model in it."""
    config, found = _MixedPrecision(BFLOAT, FLOAT), []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = mlp()
        if compiles and not outside:
            model = torch.compile(model, backend="eager")
        net = DistributedDataParallel(model, process_group=comm, mixed_precision=config)
        if compiles and outside:
            net = torch.compile(net, backend="eager")
        found.append([])
        for step in range(3):
            net.zero_grad()
            out = net(rows(step, comm.rank))
            assert out.dtype == BFLOAT
            loss(out).backward()
            found[-1] += [p.grad.clone() for p in net.parameters()]
            assert all(p.dtype == p.grad.dtype == FLOAT for p in net.parameters())
    assert equal(*found)
