"""Where a DistributedDataParallel stands in a graph: within another one, recomputed, at its leaves.
Gradients are torch's, at 2 ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringdp import Communicator, DistributedDataParallel
from ringdp.parallel.values.tensor_tree import map_tensors, tensors
from tests.parallel.ddp_cases import (
    STATIC,
    TINY,
    TORCHS,
    UNUSED,
    WIDTH,
    Branches,
    Wrap,
    backward,
    equal,
    gloo,
    gradients,
    loss,
    mlp,
    of_both,
    rows,
    says,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

VIEWS = {"gradient_as_bucket_view": True}


# ---- within another


def norm() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(WIDTH), mlp())


@pytest.mark.parametrize("options", [{}, TINY, UNUSED, VIEWS])
@on_ranks(2)
def test_gradients_are_reduced_once_by_the_outermost(
    comm: Communicator, options: dict[str, Any]
) -> None:
    """By turns the outer one reduces all, the inner one alone reduces, and is called alone.
    torch's cannot nest views."""

    def found(wrap: Wrap) -> list[Tensor]:
        taken = options if wrap is not TORCHS or options != VIEWS else {}
        inner = wrap(norm(), **taken)
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

    assert equal(*of_both(found))


@on_ranks(2)
def test_an_inner_one_reduces_what_the_outer_leaves_to_it(comm: Communicator) -> None:
    """The outer one leaves the inner one's parameters to it."""

    def found(wrap: Wrap) -> list[Tensor]:
        inner = wrap(mlp())
        whole = nn.Sequential(nn.Linear(WIDTH, WIDTH), inner)
        ours = [name for name, _ in whole.named_parameters() if name.startswith("1.")]
        TORCHS._set_params_and_buffers_to_ignore_for_model(whole, ours)
        net = wrap(whole)
        return [g for step in range(3) for g in backward(net, step, comm.rank)]

    assert equal(*of_both(found))


class Again(nn.Module):
    """`inner`, without keeping what it computes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("outer", [True, False])
@on_ranks(2)
def test_an_inner_one_may_be_recomputed(comm: Communicator, outer: bool) -> None:
    """The inner one's forward is recomputed in backward."""

    def found(wrap: Wrap) -> list[Tensor]:
        inner = wrap(mlp())
        again = Again(inner)
        net = wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), again)) if outer else again
        return [g for step in range(3) for g in backward(net, step, comm.rank)]

    assert equal(*of_both(found))


def mismatched(comm: Communicator) -> list[str]:
    gloo()
    within_torchs = TORCHS(nn.Sequential(DistributedDataParallel(mlp())))
    whole = nn.Sequential(DistributedDataParallel(mlp()))
    name = "0.module.0.weight"
    TORCHS._set_params_and_buffers_to_ignore_for_model(whole, [name])
    shared = DistributedDataParallel(whole)
    return [says(lambda net=net: net(rows(0, comm.rank))) for net in (within_torchs, shared)]


def test_what_two_would_reduce_is_told(ranks):
    for torchs, shared in ranks(2)(mismatched):
        assert "torch.nn.parallel.distributed.DistributedDataParallel" in torchs
        assert "would reduce 0.weight, 0.bias, 2.weight and 3 more: take one alone" in torchs
        assert "would reduce 0.bias, 2.weight" in shared


# ---- recomputed as a whole


@pytest.mark.parametrize("options", [{}, UNUSED, STATIC])
@on_ranks(2)
def test_all_of_it_may_be_recomputed(comm: Communicator, options: dict[str, Any]) -> None:
    def found(wrap: Wrap) -> list[Tensor]:
        net = wrap(mlp() if not options else Branches(0, differ=False), **options)
        again = Again(net)
        return [g for step in range(4) for g in backward(again, step, comm.rank)]

    assert equal(*of_both(found))


# ---- what it returns


class Table(nn.Module):
    """A parameter and its input are among what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(3))
        self.a, self.b = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.a(x), self.b(x), self.table, x


@pytest.mark.parametrize("options", [UNUSED, STATIC])
@on_ranks(2)
def test_leaves_that_are_returned_are_listened_to_for_one_backward(
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
    """Its tensors are in containers of classes of its own."""

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

    assert equal(*of_both(found))


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


def context(comm: Communicator, options: dict[str, Any]) -> str:
    from torch.distributed import autograd

    autograd._init(comm.rank)
    net = DistributedDataParallel(mlp(), process_group=comm, **options)
    with autograd.context() as here:
        value = loss(net(rows(0, comm.rank)))
        return says(lambda: autograd.backward(here, [value]), RuntimeError)


@pytest.mark.parametrize("options", [{}, UNUSED, STATIC])
def test_distributed_autograd_is_told(ranks, options):
    for text in ranks(2)(context, options):
        assert "distributed autograd" in text
