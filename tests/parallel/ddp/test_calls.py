"""Undocumented methods of torch's DistributedDataParallel that frameworks call do the same on ours,
at 2 ranks."""

from __future__ import annotations

import copy
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward

from ringdp import Communicator, DistributedDataParallel, UsageError
from tests.equal import equal
from tests.parallel.ddp.cases import (
    CNN,
    UNUSED,
    WIDTH,
    Branches,
    Outputs,
    Wrap,
    backward,
    error_text,
    gloo,
    gradients,
    images,
    loss,
    mlp,
    ours_and_torchs,
    rows,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


@on_ranks(2)
def test_buckets_unused_on_all_ranks_can_be_skipped(comm: Communicator) -> None:
    """Layers that no rank uses have a bucket of their own."""

    def train(*, skips: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        net: Any = DistributedDataParallel(
            Branches(0, differ=False),
            process_group=comm,
            bucket_cap_mb=0,
            find_unused_parameters=True,
            skip_all_reduce_unused_params=skips,
        )
        reduced = []
        for step in range(3):
            reduced += backward(net, step, comm.rank)
        return reduced, net._get_ddp_logging_data()["num_buckets_reduced"]

    (found, some), (expected, every) = train(skips=True), train(skips=False)
    assert equal(found, expected)
    assert (some, every) == (6, 12)  # of 12 weights and biases


@on_ranks(2)
def test_buckets_are_not_skipped_that_were_used_in_no_sync(comm: Communicator) -> None:
    net = DistributedDataParallel(
        Outputs(),
        process_group=comm,
        bucket_cap_mb=0,
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
    )
    with net.no_sync():
        loss(net(rows(0, comm.rank))["predictions"][1]).backward()
    own = net.module.b.weight.grad.clone()
    loss(net(rows(0, comm.rank))["predictions"][0]).backward()
    comm.all_reduce(own.div_(2))
    assert torch.equal(net.module.b.weight.grad, own)
    net.zero_grad()
    loss(net(rows(1, comm.rank))["predictions"][0]).backward()
    assert net.module.b.weight.grad is None


@pytest.mark.parametrize("unused", [False, True])
@on_ranks(2)
def test_reduction_can_be_requested_between_forward_and_backward(
    comm: Communicator, unused: bool
) -> None:
    """Whether to reduce is set between forward and backward, as Lightning, accelerate and
    pipelining do."""

    def found(wrap: Wrap) -> list[Tensor]:
        net: Any = wrap(mlp(), find_unused_parameters=unused)
        reduced = []
        for step in range(3):
            net.zero_grad()
            net.require_backward_grad_sync = False
            out = net(rows(step, comm.rank))
            net.require_backward_grad_sync = net.require_forward_param_sync = True
            net.reducer._rebuild_buckets()
            net.reducer.prepare_for_backward([out])
            loss(out).backward()
            reduced += gradients(net)
        return reduced

    assert equal(*ours_and_torchs(found))


@pytest.mark.parametrize("first", [True, False])
@on_ranks(2)
def test_optimizers_in_backward_step_with_the_average(comm: Communicator, first: bool) -> None:
    """`first`: the optimizers exist before the model is wrapped. The last step accumulates two
    parts."""

    def train(*, within: bool, views: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, made = mlp(), []

        def attach() -> None:
            if within:
                _apply_optimizer_in_backward(torch.optim.Adam, model.parameters(), {"lr": 0.1})
            else:
                made.append(torch.optim.Adam(model.parameters(), lr=0.1))

        if first:
            attach()
        net = DistributedDataParallel(model, process_group=comm, gradient_as_bucket_view=views)
        if not first:
            attach()
        for step in range(3):
            if step == 2:
                with net.no_sync():
                    loss(net(rows(7, comm.rank))).backward()
            loss(net(rows(step, comm.rank))).backward()
            for optimizer in made:
                optimizer.step()
                optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        return list(model.parameters())

    expected = train(within=False, views=False)
    for views in (False, True):
        assert equal(train(within=True, views=views), expected)


@on_ranks(2)
def test_the_profiler_sees_forward_and_reductions(comm: Communicator) -> None:
    gloo()
    net = DistributedDataParallel(
        nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3)),
        process_group=comm,
        find_unused_parameters=True,
    )
    with torch.profiler.profile() as profile:
        for step in range(3):
            backward(net, step, comm.rank)
    seen = Counter({event.key: event.count for event in profile.key_averages()})
    assert seen["DistributedDataParallel.forward"] == 3, seen
    assert seen["search_unused_parameters"] == 3, seen
    assert seen["gloo:broadcast"] == 3, seen
    assert seen["gloo:all_reduce"] == 6, seen  # gradients, and the map of used parameters


@on_ranks(2)
def test_a_fused_optimizer_hook_steps_as_torchs(comm: Communicator) -> None:
    def train(wrap: Wrap) -> list[Tensor]:
        net: Any = wrap(mlp())
        net._register_fused_optim(torch.optim.SGD, 0.1, momentum=0.9)
        for step in range(3):
            backward(net, step, comm.rank)
        return list(net.parameters())

    assert equal(*ours_and_torchs(train))
    elsewhere: Any = DistributedDataParallel(mlp(), process_group=comm)
    # the hook would reduce over the default group
    with pytest.raises(UsageError, match="default group"):
        elsewhere._register_fused_optim(torch.optim.SGD, 0.1)


@pytest.mark.parametrize("name", ["ALLREDUCE", "FP16_COMPRESS"])
@on_ranks(2)
def test_built_in_hooks_give_torchs_bits(comm: Communicator, name: str) -> None:
    kind = getattr(dist.BuiltinCommHookType, name)

    def found(wrap: Wrap) -> list[Tensor]:
        net: Any = wrap(mlp(), bucket_cap_mb=0.001)
        net._register_builtin_comm_hook(kind)
        assert net._get_ddp_logging_data()["comm_hook"] == str(kind)
        return [g for step in range(3) for g in backward(net, step, comm.rank)]

    assert equal(*ours_and_torchs(found))


@on_ranks(2)
def test_a_built_in_hook_takes_sparse_gradients(comm: Communicator) -> None:
    def wrap() -> Any:
        torch.manual_seed(0)
        return DistributedDataParallel(nn.Embedding(4, 2, sparse=True), process_group=comm)

    plain, hooked = wrap(), wrap()
    hooked._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    for net in (plain, hooked):
        net(torch.tensor([0, 1 + comm.rank])).sum().backward()
    assert torch.equal(plain.module.weight.grad.to_dense(), hooked.module.weight.grad.to_dense())
    error_text(lambda: wrap()._register_builtin_comm_hook(3), ValueError)
    halved = wrap()
    halved._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    message = error_text(lambda: halved(torch.tensor([0])).sum().backward(), UsageError)
    assert message.startswith("BuiltinCommHookType.FP16_COMPRESS takes no sparse gradients")


@on_ranks(2)
def test_a_model_can_be_wrapped_again_after_a_failed_backward(comm: Communicator) -> None:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, _gradient: Tensor) -> Tensor:
            raise ZeroDivisionError

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    first: Any = DistributedDataParallel(model, process_group=comm)
    tap = model[1].register_forward_pre_hook(lambda _m, x: (Raises.apply(x[0]),))
    with pytest.raises(ZeroDivisionError):
        loss(first(rows(0, comm.rank))).backward()
    tap.remove()
    error_text(first._check_reducer_finalized)
    first._remove_autograd_hooks()
    sent = first.sent_bytes()
    second: Any = DistributedDataParallel(model, process_group=comm)
    reduced = backward(second, 0, comm.rank)
    second._check_reducer_finalized()
    second._remove_autograd_hooks()
    alone = backward(model, 0, comm.rank)
    for mine, other in zip(reduced, alone, strict=True):
        half = other / comm.size
        comm.all_reduce(half)
        assert torch.equal(mine, half)
    assert first.sent_bytes() == sent


@pytest.mark.parametrize("options", [{}, UNUSED, UNUSED | {"gradient_as_bucket_view": True}])
@on_ranks(2)
def test_a_backward_to_the_inputs_only_does_not_reduce(
    comm: Communicator, options: dict[str, bool]
) -> None:
    """As for a gradient penalty: the backward that computes the inputs' gradients reaches no
    parameter."""

    def found(wrap: Wrap) -> list[Tensor]:
        layers = nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3, bias=False)
        net: Any = wrap(nn.Sequential(*layers), **options)
        reduced = []
        for both, first in product((False, True), repeat=2):
            net.zero_grad()
            if first:  # accumulated gradients are reduced, too
                with net.no_sync():
                    loss(net(rows(1, comm.rank))).backward()
            x = rows(0, comm.rank).requires_grad_()
            out = net(x)
            (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            assert not getattr(net.reducer, "flights", ())  # buckets are free for the next
            penalty = g.square().sum()
            (loss(out) + penalty if both else penalty).backward()
            reduced += gradients(net)
        return reduced

    assert equal(*ours_and_torchs(found))


@pytest.mark.parametrize("options", [{}, UNUSED])
@on_ranks(2)
def test_a_backward_of_no_sync_reduces_if_one_was_due(
    comm: Communicator, options: dict[str, bool]
) -> None:
    """A forward whose gradients were never asked for left it so, here and in torch."""

    def found(wrap: Wrap) -> list[Tensor]:
        net: Any = wrap(Outputs() if options else mlp(), **options)

        def out(step: int) -> Tensor:
            out = net(rows(step, comm.rank))
            return out["predictions"][0] if options else out

        out(0)
        with net.no_sync():
            loss(out(1)).backward()
        reduced = gradients(net)
        loss(out(2)).backward()
        return [*(g.clone() for g in reduced), *gradients(net)]

    assert equal(*ours_and_torchs(found))


@on_ranks(2)
def test_outputs_can_be_changed_in_place(comm: Communicator) -> None:
    """The returned tensors are not copies, and may be changed in place even with
    find_unused_parameters."""

    def found(wrap: Wrap) -> list[Tensor]:
        net: Any = wrap(mlp(), find_unused_parameters=True)
        if wrap is DistributedDataParallel:
            net._set_ddp_sink_clone(False)
        out = net(rows(0, comm.rank))
        out *= 2
        loss(out).backward()
        return gradients(net)

    assert equal(*ours_and_torchs(found))


@on_ranks(2)
def test_buffers_can_be_broadcast_from_a_rank(comm: Communicator) -> None:
    net: Any = DistributedDataParallel(nn.BatchNorm1d(WIDTH), process_group=comm)
    for at_once in (None, 8):
        net.module.running_mean.fill_(comm.rank + 3)
        net._default_broadcast_coalesced(bucket_size=at_once, authoritative_rank=1)
        assert net.module.running_mean.tolist() == [4] * WIDTH
    one = torch.full((2,), float(comm.rank))
    net._default_broadcast_coalesced([one])
    assert one.tolist() == [0, 0]


def follow_with_frozen_copy(comm: Communicator, wrap: Wrap) -> list[Tensor]:
    """A frozen copy that follows the model, and is itself trained at the end."""
    net = wrap(CNN())
    follower = copy.deepcopy(net).requires_grad_(False)
    found = []
    for step in range(2):
        net.zero_grad()
        images(net, step, comm.rank)
        with torch.no_grad():
            for p, q in zip(net.parameters(), follower.parameters(), strict=True):
                q.lerp_(p - 0.1 * p.grad, 0.5)
            found.append(follower.eval()(rows(step, comm.rank, 1, 2, 8, 8)))
        found.append(follower.train()(rows(step, comm.rank, 2, 2, 8, 8)))
    images(follower.requires_grad_(), 2, comm.rank)
    return [*found, *gradients(follower)]


@on_ranks(2)
def test_a_frozen_copy_behaves_as_torchs(comm: Communicator) -> None:
    ours, theirs = ours_and_torchs(lambda wrap: follow_with_frozen_copy(comm, wrap))
    assert equal(ours, theirs)
