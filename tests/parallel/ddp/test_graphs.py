"""A DistributedDataParallel inside another, inside a checkpoint, and with unusual outputs:
gradients are torch's, at 2 ranks."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringdp import Communicator, DistributedDataParallel
from ringdp.parallel.values.tensor_tree import map_tensors, tensors
from tests.equal import equal
from tests.parallel.ddp.cases import (
    STATIC,
    TINY,
    TORCHS,
    UNUSED,
    WIDTH,
    Branches,
    Wrap,
    backward,
    error_text,
    gloo,
    gradients,
    loss,
    mlp,
    ours_and_torchs,
    rows,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

VIEWS = {"gradient_as_bucket_view": True}


# ---- within another


def batch_norm_mlp() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(WIDTH), mlp())


@pytest.mark.parametrize("options", [{}, TINY, UNUSED, VIEWS])
@on_ranks(2)
def test_gradients_are_reduced_once_by_the_outermost(
    comm: Communicator, options: dict[str, Any]
) -> None:
    """In turn the outer one reduces everything, the inner one reduces alone, and the inner one is
    called directly. torch's cannot nest bucket views."""

    def found(wrap: Wrap) -> list[Tensor]:
        taken = options if wrap is not TORCHS or options != VIEWS else {}
        inner = wrap(batch_norm_mlp(), **taken)
        net = wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), inner), **taken)
        seen = []
        for step in range(4):
            seen += backward(net, 2 * step, comm.rank)
            net.zero_grad()
            with net.no_sync():
                loss(net(rows(step, comm.rank))).backward()
            seen += gradients(net) + backward(inner, 2 * step + 1, comm.rank)
            seen += [b.clone() for b in net.buffers()]
        return seen

    assert equal(*ours_and_torchs(found))


@on_ranks(2)
def test_an_inner_one_reduces_the_parameters_ignored_by_the_outer(comm: Communicator) -> None:
    def found(wrap: Wrap) -> list[Tensor]:
        inner = wrap(mlp())
        whole = nn.Sequential(nn.Linear(WIDTH, WIDTH), inner)
        ours = [name for name, _ in whole.named_parameters() if name.startswith("1.")]
        TORCHS._set_params_and_buffers_to_ignore_for_model(whole, ours)
        net = wrap(whole)
        return [g for step in range(3) for g in backward(net, step, comm.rank)]

    assert equal(*ours_and_torchs(found))


class Recomputed(nn.Module):
    """`inner` under activation checkpointing."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("outer", [True, False])
@on_ranks(2)
def test_an_inner_one_can_be_recomputed(comm: Communicator, outer: bool) -> None:
    def found(wrap: Wrap) -> list[Tensor]:
        inner = wrap(mlp())
        recomputed = Recomputed(inner)
        net = wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), recomputed)) if outer else recomputed
        return [g for step in range(3) for g in backward(net, step, comm.rank)]

    assert equal(*ours_and_torchs(found))


@on_ranks(2)
def test_parameters_that_two_would_reduce_are_an_error(comm: Communicator) -> None:
    gloo()
    within_torchs = TORCHS(nn.Sequential(DistributedDataParallel(mlp())))
    whole = nn.Sequential(DistributedDataParallel(mlp()))
    name = "0.module.0.weight"
    TORCHS._set_params_and_buffers_to_ignore_for_model(whole, [name])
    shared = DistributedDataParallel(whole)
    text = error_text(lambda: within_torchs(rows(0, comm.rank)))
    assert "torch.nn.parallel.distributed.DistributedDataParallel" in text
    assert "would reduce 0.weight, 0.bias, 2.weight and 3 more: take one alone" in text
    assert "would reduce 0.bias, 2.weight" in error_text(lambda: shared(rows(0, comm.rank)))


class Meets(nn.Sequential):
    """Its forwards without gradients wait for each other, `barrier` at a time."""

    barrier: threading.Barrier

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self.barrier.wait()
        out: Tensor = super().forward(x)
        return out


@on_ranks(2)
def test_a_forward_in_another_thread_is_not_around_it(comm: Communicator) -> None:
    """Of torch's two forwards the one that ends last may leave torch's variable set."""
    module = Meets(mlp())
    alone = DistributedDataParallel(copy.deepcopy(module), process_group=comm)
    net = DistributedDataParallel(module, process_group=comm)
    module.barrier = threading.Barrier(2)

    def evaluate() -> None:
        with torch.no_grad():
            net(rows(0, comm.rank))

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(evaluate) for _ in range(2)]:
            done.result()
    assert TORCHS._get_active_ddp_module() is None
    assert equal(backward(net, 1, comm.rank), backward(alone, 1, comm.rank))


# ---- transforms of torch.func


@on_ranks(2)
def test_transforms_of_torch_func_call_it(comm: Communicator) -> None:
    """As its first forward, too, in which parameters are checked."""

    def found(wrap: Wrap) -> list[Tensor]:
        net = wrap(mlp())

        def value(x: Tensor) -> Tensor:
            return loss(net(x))

        x = rows(0, comm.rank)
        seen = [torch.func.grad(value)(x), *torch.func.jvp(value, (x,), (x,))]
        loss(torch.vmap(net)(x)).backward()
        return seen + gradients(net) + backward(net, 1, comm.rank)

    assert equal(*ours_and_torchs(found))


# ---- recomputed as a whole


@pytest.mark.parametrize("options", [{}, UNUSED, STATIC])
@on_ranks(2)
def test_the_wrapper_can_be_recomputed(comm: Communicator, options: dict[str, Any]) -> None:
    def found(wrap: Wrap) -> list[Tensor]:
        net = wrap(mlp() if not options else Branches(0, differ=False), **options)
        recomputed = Recomputed(net)
        return [g for step in range(4) for g in backward(recomputed, step, comm.rank)]

    assert equal(*ours_and_torchs(found))


# ---- what it returns


class Table(nn.Module):
    """A parameter and the input are among its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(3))
        self.a, self.b = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.a(x), self.b(x), self.table, x


@pytest.mark.parametrize("options", [UNUSED, STATIC])
@on_ranks(2)
def test_returned_leaves_have_hooks_for_one_backward_only(
    comm: Communicator, options: dict[str, Any]
) -> None:
    net: Any = DistributedDataParallel(Table(), process_group=comm, **options)
    alone = copy.deepcopy(net.module)
    for step in range(3):
        averages, x = [], rows(step, comm.rank).requires_grad_()
        for model in (net, alone):
            model.zero_grad()
            a, _, table, same = model(x)
            assert same is x
            (loss(a) + table.sum() + same.sum()).backward()
            averages.append(gradients(model))
        for average, own in zip(*averages, strict=True):
            comm.all_reduce(own.div_(comm.size))
            assert torch.equal(average, own)
        assert not net.module.table._backward_hooks
        assert not x._backward_hooks
    with net.no_sync():
        _, b, table, _ = net(x)
        table.square().sum().backward()
        loss(b).backward()


class Dict(dict):  # type: ignore[type-arg]
    pass


class List(list):  # type: ignore[type-arg]
    pass


class Tuple(tuple):  # type: ignore[type-arg]
    pass


class Derived(nn.Module):
    """Returns tensors in containers of derived classes."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Dict:
        return Dict(out=[Tuple([List([self.used(x)])])])


@on_ranks(2)
def test_tensors_are_found_in_derived_containers(comm: Communicator) -> None:
    def found(wrap: Wrap) -> list[Tensor]:
        net = wrap(Derived(), **UNUSED)
        seen = []
        for step in range(3):
            net.zero_grad()
            loss(net(rows(step, comm.rank))["out"][0][0][0]).backward()
            seen += gradients(net)
        return seen

    assert equal(*ours_and_torchs(found))


def test_derived_containers_are_mapped():
    value = Dict(a=Tuple([torch.ones(1), 2]), b=List([torch.ones(2), "c"]), c=Tuple([3]))
    value["a"].note = "kept"
    found = map_tensors(lambda t: t + 1, value, which=lambda _: True)
    assert [t.tolist() for t in tensors(found)] == [[2], [2, 2]]
    assert [t.tolist() for t in tensors(value)] == [[1], [1, 1]]
    assert [type(x) for x in (found, *found.values())] == [Dict, Tuple, List, Tuple]
    assert found["a"].note == "kept"
    assert found["b"][1:] == ["c"]
    assert found["c"] is value["c"]


# ---- distributed autograd


@pytest.mark.parametrize("options", [{}, UNUSED, STATIC])
@on_ranks(2)
def test_distributed_autograd_is_refused(comm: Communicator, options: dict[str, Any]) -> None:
    from torch.distributed import autograd

    autograd._init(comm.rank)
    net = DistributedDataParallel(mlp(), process_group=comm, **options)
    with autograd.context() as here:
        value = loss(net(rows(0, comm.rank)))
        text = error_text(lambda: autograd.backward(here, [value]), RuntimeError)
        assert "distributed autograd" in text
