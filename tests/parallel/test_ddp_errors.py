"""What DistributedDataParallel refuses, and says of models and backwards that are wrong."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel.distributed import _MixedPrecision

from ringdp import Communicator, DistributedDataParallel, ModelError, UsageError
from ringdp.parallel.ddp import module
from tests.parallel.ddp_cases import (
    Outputs,
    backward,
    loss,
    mlp,
    rows,
    says,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


@on_ranks(2)
def test_a_wrong_model_or_argument_is_told(comm: Communicator) -> None:
    def wrap(model: Any = None, **options: Any) -> DistributedDataParallel:
        return DistributedDataParallel(model or mlp(), process_group=comm, **options)

    net = wrap(Outputs())
    loss(net(rows(0, comm.rank))["predictions"][0]).backward()
    unfinished = says(lambda: net(rows(1, comm.rank)))
    assert "Parameter indices which did not receive grad for rank" in unfinished
    lacking = f"Parameters which did not receive grad for rank {comm.rank}: b.weight, b.bias"
    assert lacking in unfinished.splitlines()[-1]
    assert issubclass(ModelError, RuntimeError)
    sync = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    sparse = wrap(nn.Sequential(nn.Embedding(3, 2, sparse=True)))

    def used_outside() -> None:
        weight = sparse.module[0].weight
        weight.sum().backward()
        sparse(torch.tensor([0]))[0].mul(weight).sum().backward()

    for text, word in (
        (says(lambda: wrap(mlp().requires_grad_(False))), "no trainable parameter"),
        (says(lambda: wrap(nn.LazyLinear(3))), "uninitialized"),
        (says(lambda: wrap(sync), UsageError), "ringdp.SyncBatchNorm"),
        (says(lambda: wrap(device_ids=[0]), UsageError), "device_ids"),
        (says(lambda: wrap(bucket_cap_mb=-1), UsageError), "at least 0"),
        (
            says(lambda: DistributedDataParallel(mlp(), process_group=3), UsageError),
            "ringdp.Communicator",
        ),
        (says(lambda: wrap().register_comm_hook(None, 3), TypeError), "callable"),
        (
            says(lambda: wrap(mixed_precision=_MixedPrecision(torch.int8)), UsageError),
            "_MixedPrecision",
        ),
        (says(lambda: Join([wrap()]), UsageError), "torch.distributed group"),
        (says(lambda: pickle.dumps(wrap())), "default process group"),
        (says(used_outside), "to have sparse gradient"),
    ):
        assert word in text, text


def fails(_state: object, _bucket: object) -> Any:
    raise RuntimeError("the hook's own")


def fails_later(_state: object, _bucket: object) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_exception(RuntimeError("the hook's own"))
    return future


@pytest.mark.parametrize("hook", [fails, fails_later])
@on_ranks(2)
def test_a_reduction_that_failed_is_not_put_down_to_unused_parameters(
    comm: Communicator, hook: Any
) -> None:
    net = DistributedDataParallel(mlp(), process_group=comm)
    net.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match="the hook's own"):
        loss(net(rows(0, comm.rank))).backward()
    text = says(lambda: net(rows(1, comm.rank)))
    assert text.startswith("Expected to have finished reduction in the prior iteration"), text
    assert "an error ended it" in text, text
    assert "find_unused_parameters" not in text, text


FORMATS = torch.contiguous_format, torch.channels_last


def unequal(comm: Communicator) -> list[str]:
    models = [
        nn.Sequential(nn.Linear(2, 3 + comm.rank)),
        nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + comm.rank))),
        nn.Sequential(nn.Linear(2, 2).to([torch.float32, torch.float64][comm.rank])),
        nn.Sequential(nn.Conv2d(2, 2, 2).to(memory_format=FORMATS[comm.rank])),
    ]
    return [says(lambda m=m: DistributedDataParallel(m, process_group=comm)) for m in models]


def test_models_that_differ_are_told_on_every_rank(ranks):
    for shapes, counts, dtypes, strides in ranks(2)(unequal):
        assert "params[0], '0.weight' with sizes [4, 2]" in shapes
        assert "on rank 1, appears not to match sizes of" in shapes
        assert "process 0: '0.weight' with sizes [3, 2]" in shapes
        assert "Rank 0 has 2 params, while rank 1 has inconsistent 4 params: '1.weight'" in counts
        assert "with dtype torch.float64 on rank 1, appears not to match dtype of" in dtypes
        assert "appears not to match strides of the same param in process 0" in strides


def no_gradient(_: Tensor) -> Tensor:
    raise KeyError("the user's own")


def raised(comm: Communicator) -> str:
    net = DistributedDataParallel(mlp(), process_group=comm, bucket_cap_mb=0)
    first, *_, last = net.parameters()
    first.register_hook(no_gradient)

    def meet(_: Tensor) -> None:
        comm.barrier()

    if comm.rank:
        last.register_hook(meet)
    return says(lambda: backward(net, 0, comm.rank), KeyError)


@on_ranks(2)
def test_the_users_error_is_heard_before_that_a_rank_has_left_for_it(comm: Communicator) -> None:
    """On both, but rank 0 has let go of its model before rank 1 has reduced anything."""
    said = raised(comm)
    gc.collect()
    if not comm.rank:
        comm.barrier()
    assert said == '"the user\'s own"'


@on_ranks(2)
def test_a_backward_for_each_loss_is_told_where_unused_parameters_are_sought(
    comm: Communicator,
) -> None:
    """The second loss's parameters are unused in the first's backward, which is reduced."""
    net = DistributedDataParallel(Outputs(), process_group=comm, find_unused_parameters=True)
    for step in range(2):
        net(rows(step, comm.rank))["predictions"][0].sum().backward()
        with net.no_sync():
            net(rows(step, comm.rank))["predictions"][1].sum().backward()
    first, second = net(rows(2, comm.rank))["predictions"]
    loss(first).backward()
    net.module.b.weight.square().sum().backward()  # the same on all ranks
    text = says(loss(second).backward)
    assert "Expected one backward after a forward" in text, text
    assert "b.bias" in text or "b.weight" in text, text


def twice(comm: Communicator, **options: Any) -> str:
    from tests.parallel.ddp_cases import Checkpointed

    net = DistributedDataParallel(
        Checkpointed(reentrant=True, twice=True), process_group=comm, **options
    )
    return says(lambda: backward(net, 0, comm.rank))


def test_a_gradient_made_twice_is_told(ranks):
    for text in ranks(2)(twice):
        assert "inner.2.bias has been marked as ready twice" in text
        assert "use_reentrant=False" in text


@on_ranks(2)
def test_a_static_graph_that_changes_is_told(comm: Communicator) -> None:
    net = DistributedDataParallel(Outputs(), process_group=comm, static_graph=True)
    for outputs in (2, 1):
        sum(map(loss, net(rows(0, comm.rank))["predictions"][:outputs])).backward()
    text = says(lambda: net(rows(1, comm.rank)))
    assert "training graph has changed in this iteration" in text, text
    assert ": b.weight, b.bias" in text, text


def unmade(comm: Communicator) -> str:
    """It is a property of a module, which answers an AttributeError by its own."""
    net = copy.deepcopy(DistributedDataParallel(mlp()))
    comm.barrier()
    with patch.object(module, "Reducer", side_effect=AttributeError("no such thing")):
        return says(lambda: net.reducer, RuntimeError)


def test_why_a_copy_cannot_reduce_is_told(ranks):
    for text in ranks(2)(unmade):
        assert text == "the reducer could not be made: no such thing"
