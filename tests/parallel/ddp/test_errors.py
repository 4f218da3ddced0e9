"""Wrong models, arguments and backwards of DistributedDataParallel, and their errors. (Those that
torch has, too, are in test_raises.)"""

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
from tests.parallel.ddp.cases import Checkpointed, Outputs, backward, error_text, loss, mlp, rows
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


@on_ranks(2)
def test_wrong_models_and_arguments_are_refused(comm: Communicator) -> None:
    def wrap(model: Any = None, **options: Any) -> DistributedDataParallel:
        return DistributedDataParallel(model or mlp(), process_group=comm, **options)

    net = wrap(Outputs())
    loss(net(rows(0, comm.rank))["predictions"][0]).backward()
    unfinished = error_text(lambda: net(rows(1, comm.rank)))
    assert "Parameter indices which did not receive grad for rank" in unfinished
    lacking = f"Parameters which did not receive grad for rank {comm.rank}: b.weight, b.bias"
    assert lacking in unfinished.splitlines()[-1]
    assert issubclass(ModelError, RuntimeError)
    sync = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    sparse = wrap(nn.Sequential(nn.Embedding(3, 2, sparse=True)))

    with torch.inference_mode():
        frozen = nn.BatchNorm1d(2)
    written = nn.BatchNorm1d(2)
    written.running_mean = frozen.running_mean

    def used_outside() -> None:
        weight = sparse.module[0].weight
        weight.sum().backward()
        sparse(torch.tensor([0]))[0].mul(weight).sum().backward()

    def undeclared() -> None:
        table = nn.Embedding(3, 2)
        net = wrap(table)
        table.sparse = True
        net(torch.tensor([0])).sum().backward()

    for text, word in (
        (error_text(lambda: wrap(mlp().to("meta"))), "on the meta device"),
        (error_text(lambda: wrap(frozen), UsageError), "weight was made in torch.inference_mode"),
        (error_text(lambda: wrap(written), UsageError), "running_mean was made in torch.inference"),
        (error_text(lambda: wrap(sync), UsageError), "ringdp.SyncBatchNorm"),
        (error_text(lambda: wrap(bucket_cap_mb=-1), UsageError), "at least 0"),
        (
            error_text(lambda: DistributedDataParallel(mlp(), process_group=3), UsageError),
            "ringdp.Communicator",
        ),
        (
            error_text(lambda: wrap(mixed_precision=_MixedPrecision(torch.int8)), UsageError),
            "_MixedPrecision",
        ),
        (error_text(lambda: Join([wrap()]), UsageError), "torch.distributed group"),
        (error_text(lambda: pickle.dumps(wrap())), "default process group"),
        (error_text(used_outside), "to have sparse gradient"),
        (error_text(undeclared), "Expected weight to have a dense gradient"),
    ):
        assert word in text, text

    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(written, ["running_mean"])
    wrap(written)  # which writes no ignored buffer


def failing_hook(_state: object, _bucket: object) -> Any:
    raise RuntimeError("the hook's own")


def hook_with_failing_future(_state: object, _bucket: object) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_exception(RuntimeError("the hook's own"))
    return future


@pytest.mark.parametrize("hook", [failing_hook, hook_with_failing_future])
@on_ranks(2)
def test_a_failed_reduction_is_not_blamed_on_unused_parameters(
    comm: Communicator, hook: Any
) -> None:
    net = DistributedDataParallel(mlp(), process_group=comm)
    net.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match="the hook's own"):
        loss(net(rows(0, comm.rank))).backward()
    text = error_text(lambda: net(rows(1, comm.rank)))
    assert text.startswith("Expected to have finished reduction in the prior iteration"), text
    assert "an error ended it" in text, text
    assert "find_unused_parameters" not in text, text


FORMATS = torch.contiguous_format, torch.channels_last


@on_ranks(2)
def test_different_models_are_refused_on_every_rank(comm: Communicator) -> None:
    models = [
        nn.Sequential(nn.Linear(2, 3 + comm.rank)),
        nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + comm.rank))),
        nn.Sequential(nn.Linear(2, 2).to([torch.float32, torch.float64][comm.rank])),
        nn.Sequential(nn.Conv2d(2, 2, 2).to(memory_format=FORMATS[comm.rank])),
    ]
    shapes, counts, dtypes, strides = (
        error_text(lambda m=m: DistributedDataParallel(m, process_group=comm)) for m in models
    )
    assert "params[0], '0.weight' with sizes [4, 2]" in shapes
    assert "on rank 1, appears not to match sizes of" in shapes
    assert "process 0: '0.weight' with sizes [3, 2]" in shapes
    assert "Rank 0 has 2 params, while rank 1 has inconsistent 4 params: '1.weight'" in counts
    assert "with dtype torch.float64 on rank 1, appears not to match dtype of" in dtypes
    assert "appears not to match strides of the same param in process 0" in strides


def raise_in_backward(_: Tensor) -> Tensor:
    raise KeyError("the user's own")


def backward_raises(comm: Communicator) -> str:
    net = DistributedDataParallel(mlp(), process_group=comm, bucket_cap_mb=0)
    first, *_, last = net.parameters()
    first.register_hook(raise_in_backward)

    def meet(_: Tensor) -> None:
        comm.barrier()

    if comm.rank:
        last.register_hook(meet)
    return error_text(lambda: backward(net, 0, comm.rank), KeyError)


@on_ranks(2)
def test_the_users_error_is_raised_rather_than_a_lost_rank(comm: Communicator) -> None:
    """Both ranks raise the user's error, although rank 0 has freed its model before rank 1 reduces
    anything."""
    message = backward_raises(comm)
    gc.collect()
    if not comm.rank:
        comm.barrier()
    assert message == '"the user\'s own"'


@on_ranks(2)
def test_a_backward_per_loss_with_find_unused_parameters_is_an_error(
    comm: Communicator,
) -> None:
    """The parameters of the second loss are unused in the first backward, which is reduced."""
    net = DistributedDataParallel(Outputs(), process_group=comm, find_unused_parameters=True)
    for step in range(2):
        first = net(rows(step, comm.rank))["predictions"][0]
        loss(first).backward(retain_graph=True)
        loss(first).backward()
        with net.no_sync():  # another forward, so this is no backward of the one before
            loss(net(rows(step, comm.rank))["predictions"][1]).backward()
    first, second = net(rows(2, comm.rank))["predictions"]
    loss(first).backward(retain_graph=True)
    net.module.b.weight.square().sum().backward()  # the same on all ranks
    loss(first).backward()  # reduces nothing, as in torch
    text = error_text(loss(second).backward)
    assert "Expected one backward after a forward" in text, text
    assert "b.bias" in text or "b.weight" in text, text


@on_ranks(2)
def test_a_backward_of_a_forward_in_no_sync_must_be_complete_where_it_reduces(
    comm: Communicator,
) -> None:
    """It does, as a forward before was to be reduced."""
    net = DistributedDataParallel(Outputs(), process_group=comm)
    net(rows(0, comm.rank))
    with net.no_sync():
        first, _ = net(rows(0, comm.rank))["predictions"]
    loss(first).backward()
    text = error_text(lambda: net(rows(1, comm.rank)))
    assert "Expected to have finished reduction" in text, text


@on_ranks(2)
def test_a_gradient_computed_twice_is_an_error(comm: Communicator) -> None:
    net = DistributedDataParallel(Checkpointed(reentrant=True, twice=True), process_group=comm)
    text = error_text(lambda: backward(net, 0, comm.rank))
    assert "inner.2.bias has been marked as ready twice" in text
    assert "use_reentrant=False" in text


@on_ranks(2)
def test_a_changing_static_graph_is_an_error(comm: Communicator) -> None:
    net = DistributedDataParallel(Outputs(), process_group=comm, static_graph=True)
    for outputs in (2, 1):
        sum(map(loss, net(rows(0, comm.rank))["predictions"][:outputs])).backward()
    text = error_text(lambda: net(rows(1, comm.rank)))
    assert "training graph has changed in this iteration" in text, text
    assert ": b.weight, b.bias" in text, text


@on_ranks(2)
def test_the_reason_why_a_copy_cannot_reduce_is_shown(comm: Communicator) -> None:
    """It is a property of an nn.Module, which would replace an AttributeError by its own."""
    net = copy.deepcopy(DistributedDataParallel(mlp()))
    comm.barrier()
    with patch.object(module, "Reducer", side_effect=AttributeError("no such thing")):
        text = error_text(lambda: net.reducer, RuntimeError)
    assert text == "the reducer could not be made: no such thing"
