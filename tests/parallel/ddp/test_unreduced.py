"""Parameters changed so that DistributedDataParallel would miss their gradients: the forward
raises."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ringdp import Communicator, DistributedDataParallel
from tests.parallel.ddp.cases import backward, error_text, loss, mlp, rows
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


def cast(net: nn.Module) -> None:
    net.double()


def cast_by_swapping(net: nn.Module) -> None:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        net.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def assigned(net: nn.Module) -> None:
    net.load_state_dict({name: t.clone() for name, t in net.state_dict().items()}, assign=True)


CHANGES = {
    "0.weight has been cast": cast,
    "0.weight has been cast since": cast_by_swapping,
    "0.weight is another parameter": assigned,
}


@pytest.mark.parametrize("words", CHANGES)
@on_ranks(2)
def test_replaced_parameters_are_an_error(comm: Communicator, words: str) -> None:
    """Changed before the first forward, or after an iteration."""

    def forward(net: nn.Module) -> None:
        backward(net, 0, comm.rank)

    for late in (False, True):
        net = DistributedDataParallel(mlp(), process_group=comm)
        if late:
            forward(net)
        CHANGES[words](net)
        dtype = next(net.parameters()).dtype
        if late:
            loss(net(rows(1, comm.rank).to(dtype))).backward()
        assert words in error_text(lambda net=net, d=dtype: net(rows(2, comm.rank).to(d)))


@on_ranks(2)
def test_parameters_replaced_in_a_copy_are_an_error(comm: Communicator) -> None:
    """In its first forward, though the original had one."""
    net = DistributedDataParallel(mlp())
    backward(net, 0, comm.rank)
    copied = copy.deepcopy(net)
    assigned(copied)
    assert "0.weight is another parameter" in error_text(lambda: copied(rows(1, comm.rank)))


@on_ranks(2)
def test_harmless_changes_of_parameters_are_accepted(comm: Communicator) -> None:
    """After forwards without a backward, with a layer removed, parameters frozen or given other
    memory."""
    net = DistributedDataParallel(
        nn.Sequential(mlp(), nn.Linear(3, 3)), process_group=comm, find_unused_parameters=True
    )
    for change in (
        lambda: net.float(),
        lambda: net.module[0][0].requires_grad_(False),
        lambda: setattr(net.module[0][2].weight, "data", net.module[0][2].weight.data.clone()),
        lambda: net.module.__delitem__(1),
    ):
        change()
        for _ in range(2):
            net(rows(0, comm.rank))
        backward(net, 1, comm.rank)


@on_ranks(2)
def test_functional_call_with_other_tensors_works(comm: Communicator) -> None:
    net = DistributedDataParallel(mlp(), process_group=comm)
    others = {name: p.detach().requires_grad_() for name, p in net.named_parameters()}
    loss(torch.func.functional_call(net, others, (rows(0, comm.rank),))).backward()
    assert all(t.grad is not None for t in others.values())


@on_ranks(2)
def test_compiled_autograd_is_refused(comm: Communicator) -> None:
    from torch._dynamo import compiled_autograd

    net = DistributedDataParallel(mlp(), process_group=comm)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        text = error_text(lambda: net(rows(0, comm.rank)))
    assert "Compiled autograd is not compatible with" in text
