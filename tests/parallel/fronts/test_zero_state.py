"""The state of ZeroRedundancyOptimizer: consolidated on one rank, as torch's, and loaded on all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import optim as torchs

import ringdp
from ringdp import Communicator
from ringdp.parallel import fronts
from tests.equal import equal
from tests.parallel.ddp.cases import gloo
from tests.parallel.small import net, step
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


def script(comm: Communicator, kind: Any, make: Any) -> tuple[Any, list[Tensor]]:
    """Trains, saves on the last rank, and continues with another optimizer on all ranks."""
    model = ringdp.DistributedDataParallel(net(), process_group=comm)
    weights, biases = ([p for p in model.parameters() if p.dim() == d] for d in (2, 1))
    groups = [{"params": biases, "lr": 0.01}, {"params": weights}]

    def make_optimizer() -> Any:
        return make([dict(g) for g in groups], optimizer_class=kind, lr=0.1)

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
