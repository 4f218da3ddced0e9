"""ZeroRedundancyOptimizer: its state is consolidated on one rank, as torch's, and loaded on all; in
torch's Join it equals the unsharded optimizer. (Training is in test_fronts.)"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import optim as torchs
from torch.distributed.algorithms.join import Join

import ringdp
from ringdp import Communicator, UsageError
from ringdp.parallel import fronts
from tests.equal import equal
from tests.parallel.ddp.cases import Branches, backward, error_text, gloo
from tests.parallel.small import groups, net, step
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


# ---- its state


def script(comm: Communicator, kind: Any, make: Any) -> tuple[Any, list[Tensor]]:
    """Trains, saves on the last rank, and continues with another optimizer on all ranks."""
    model = ringdp.DistributedDataParallel(net(), process_group=comm)

    def make_optimizer() -> Any:
        return make(groups(model), optimizer_class=kind, lr=0.1)

    optimizer, last = make_optimizer(), comm.size - 1
    step(model, optimizer, 0, 1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5).step()
    if hasattr(optimizer, "consolidate_state_dict"):
        with pytest.raises(RuntimeError, match="not been consolidated on this rank"):
            optimizer.state_dict()
        optimizer.consolidate_state_dict(to=last)
        if comm.rank != last:
            with pytest.raises(RuntimeError, match="not been consolidated on this rank"):
                optimizer.state_dict()
    saved: list[Any] = [optimizer.state_dict() if comm.rank == last else None]
    dist.broadcast_object_list(saved, last)
    fresh = make_optimizer()
    fresh.load_state_dict(copy.deepcopy(saved[0]))
    assert [g["lr"] for g in fresh.param_groups] == [0.005, 0.05]
    step(model, fresh, 2, 3)
    optimizer.load_state_dict(copy.deepcopy(saved[0]))  # after some steps
    step(model, optimizer, 4)
    return saved[0], [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    "kind", [torch.optim.NAdam, torch.optim.Adagrad, torch.optim.SGD, ringdp.AdamW]
)
@pytest.mark.parametrize("n", [2, 3])
@on_ranks()
def test_states_are_saved_and_loaded_as_torchs(comm: Communicator, kind: Any) -> None:
    gloo()
    ours, weights = script(comm, kind, fronts.ZeroRedundancyOptimizer)
    for make in (torchs.ZeroRedundancyOptimizer, lambda g, optimizer_class, lr: kind(g, lr=lr)):
        theirs, exact = script(comm, kind, make)
        assert list(ours["state"]) == list(theirs["state"])
        torch.testing.assert_close(ours["state"], theirs["state"])
        assert ours["param_groups"] == theirs["param_groups"]
        assert equal(weights, exact)


def test_a_parameter_without_elements_has_state():
    optimizer = fronts.ZeroRedundancyOptimizer(
        [nn.Parameter(torch.ones(n)) for n in (0, 3)], torch.optim.Adam, ringdp.init()
    )
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.consolidate_state_dict()
    moments = [state["exp_avg"].shape for state in optimizer.state_dict()["state"].values()]
    assert moments == [(0,), (3,)]


@on_ranks(2)
def test_hooks_of_a_load_are_called_as_torchs(comm: Communicator) -> None:
    """One before it may give other state, which is loaded; one after it sees what was."""
    for kind in (fronts.ZeroRedundancyOptimizer, torchs.ZeroRedundancyOptimizer):
        gloo()
        state = torch.optim.SGD(net().parameters(), lr=0.25).state_dict()
        optimizer: Any = kind(net().parameters(), torch.optim.SGD, lr=0.1)
        seen: list[Any] = []
        optimizer.register_load_state_dict_pre_hook(lambda _, given, seen=seen: seen.append(given))
        optimizer.register_load_state_dict_pre_hook(lambda _, given, state=state: state)
        optimizer.register_load_state_dict_post_hook(
            lambda one, seen=seen: seen.append(one.param_groups[0]["lr"])
        )
        other = torch.optim.SGD(net().parameters(), lr=0.5).state_dict()
        optimizer.load_state_dict(other)
        assert seen == [other, 0.25]
        optimizer.register_load_state_dict_pre_hook(
            lambda _, given: given.pop("more") and None, prepend=True
        )
        optimizer.load_state_dict(more := other | {"more": 1})
        assert "more" in more


class CountingOptimizer(torch.optim.Optimizer):
    """Steps by lr divided by the number of the step, which it keeps in the group, as schedule-free
    optimizers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] / group["k"] * p.grad


@on_ranks(2)
def test_counts_in_parameter_groups_are_kept(comm: Communicator) -> None:
    weights: list[list[Tensor]] = []
    for sharded in (False, True):
        model = ringdp.DistributedDataParallel(net(), process_group=comm)
        ours = (CountingOptimizer, comm) if sharded else ()
        make = fronts.ZeroRedundancyOptimizer if sharded else CountingOptimizer
        optimizer = make(model.parameters(), *ours, lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for seed in range(3):
            step(model, optimizer, seed)
            schedule.step()
        assert optimizer.param_groups[0]["k"] == 3
        assert optimizer.param_groups[0]["lr"] == 0.1 / 8
        weights.append([p.detach() for p in model.parameters()])
    assert equal(*weights)


@on_ranks(2)
def test_parameters_may_be_in_channels_last(comm: Communicator) -> None:
    found: list[list[Tensor]] = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 3))
        model[0].to(memory_format=torch.channels_last)
        wrapped = ringdp.DistributedDataParallel(model, process_group=comm)
        ours = (torch.optim.AdamW, comm) if sharded else ()
        make: Any = fronts.ZeroRedundancyOptimizer if sharded else torch.optim.AdamW
        optimizer = make(model.parameters(), *ours, lr=0.1)
        for seed in range(3):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(seed + comm.rank)
            wrapped(torch.randn(2, 3, 8, 8, generator=generator)).square().sum().backward()
            optimizer.step()
            model[1].weight.data = model[1].weight.to(memory_format=torch.channels_last)
        found.append([p.detach() for p in model.parameters()])
    assert equal(*found)


# ---- in a join, and what is refused


@pytest.mark.parametrize("by_initial_size", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@on_ranks(2)
def test_ranks_without_inputs_step_their_slices(
    comm: Communicator, kind: Any, by_initial_size: bool
) -> None:
    """With DDP, and one step of all ranks after each join. AdamW joins only once, since an
    unsharded one does not keep the state of a rank that ends early. One parameter is never used."""
    gloo()
    numbers = [1 + 2 * comm.rank, 1 + 2 * (comm.size - 1 - comm.rank)]
    found: list[list[Tensor]] = []
    for sharded in (False, True):
        torch.manual_seed(comm.rank)
        model = Branches(comm.rank, differ=False)
        net = ringdp.DistributedDataParallel(model, find_unused_parameters=True)
        make: Any = fronts.ZeroRedundancyOptimizer if sharded else kind
        optimizer = make(net.parameters(), *[kind] * sharded, lr=0.1)
        for inputs in numbers[: 1 if kind is torch.optim.AdamW else 2]:
            with Join(
                [net, optimizer][: 1 + sharded], divide_by_initial_world_size=by_initial_size
            ):
                for seed in range(inputs):
                    backward(net, seed, comm.rank)
                    optimizer.step()
            found.append([p.detach().clone() for p in net.parameters()])
        if kind is torch.optim.SGD:
            backward(net, 9, comm.rank)
            optimizer.step()
            found.append([p.detach().clone() for p in net.parameters()])
    half = len(found) // 2
    assert all(equal(a, b) for a, b in zip(found[:half], found[half:], strict=True))


@on_ranks(2)
def test_a_rank_without_inputs_drops_its_own_gradients(comm: Communicator) -> None:
    """Rank 0, whose slice is the first parameter, has a gradient of it from its last step; rank 1
    then steps only the second."""
    gloo()
    first, second = params = [nn.Parameter(torch.zeros(16)) for _ in range(2)]
    optimizer = fronts.ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=1.0)
    with Join([optimizer]):
        for step in range(1 + comm.rank):
            for p in params:
                p.grad = torch.ones(16) if step == 0 or p is second else None
            optimizer.step()
    assert torch.equal(first, torch.full((16,), -1.0))
    assert torch.equal(second, torch.full((16,), -2.0))


@on_ranks(2)
def test_join_can_raise_on_early_termination(comm: Communicator) -> None:
    gloo()
    net = ringdp.DistributedDataParallel(nn.Linear(12, 3))
    optimizer = fronts.ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)

    def train() -> None:
        with Join([net, optimizer], throw_on_early_termination=True):
            for seed in range(1 + comm.rank):
                backward(net, seed, comm.rank)
                optimizer.step()

    others = "at least one rank that exhausted inputs"
    why = others if comm.rank else "Rank 0 exhausted all inputs"
    assert why in error_text(train, RuntimeError)


@on_ranks(2)
def test_sparse_gradients_and_communicators_in_join_are_refused(comm: Communicator) -> None:
    model = nn.Embedding(4, 3, sparse=True)
    optimizer = fronts.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, comm, lr=0.1)
    model(torch.tensor([1])).sum().backward()
    before = model.weight.detach().clone()
    sparse = error_text(optimizer.step, UsageError)
    assert "parameter of shape [4, 3] is torch.sparse_coo; allowed: dense" in sparse
    with pytest.raises(UsageError, match=r": a parameter of shape \[2, 3\] is torch.sparse_coo"):
        fronts.ZeroRedundancyOptimizer(
            [torch.sparse_coo_tensor(size=(2, 3))], torch.optim.SGD, comm
        )
    group = error_text(lambda: Join([optimizer]), UsageError)
    assert "torch.distributed group: give the optimizer" in group
    assert torch.equal(model.weight, before)
