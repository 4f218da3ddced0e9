"""Errors of DistributedDataParallel have the type of torch's and contain the same key words, so
code that catches torch's works."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ringdp import Communicator
from tests.parallel.ddp.cases import Outputs, Wrap, backward, loss, mlp, ours_and_torchs, rows
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def takes_int(state: object, bucket: int) -> torch.futures.Future[Tensor]:
    raise AssertionError


def gives_int(state: object, bucket: dist.GradBucket) -> int:
    raise AssertionError


# `from __future__ import annotations` makes strings of annotations; torch compares types
for function in (hook, takes_int, gives_int):
    function.__annotations__ = {
        "bucket": int if function is takes_int else dist.GradBucket,
        "return": int if function is gives_int else torch.futures.Future[Tensor],
    }


def registered_twice(wrap: Wrap) -> None:
    net = wrap(mlp())
    for _ in range(2):
        net.register_comm_hook(None, hook)


def static_too_late(wrap: Wrap) -> None:
    net = wrap(mlp())
    backward(net, 0, 0)
    net._set_static_graph()


def unfinished(wrap: Wrap) -> None:
    net = wrap(Outputs())
    loss(net(rows(0, 0))["predictions"][0]).backward()
    net._check_reducer_finalized()


def names(wrap: Wrap, change: Callable[[list[nn.Parameter]], list[nn.Parameter]]) -> None:
    net = wrap(mlp())
    parameters, _ = net._build_params_for_reducer()
    net._build_debug_param_to_name_mapping(change(parameters))


def expanded() -> nn.Module:
    net = mlp()
    net.register_buffer("scale", torch.ones(1).expand(3))
    return net


WRONG: dict[str, Callable[[Wrap], object]] = {
    "doesn't have any parameter that requires a gradient": lambda wrap: wrap(
        mlp().requires_grad_(False)
    ),
    "Modules with uninitialized parameters can't be used with": lambda wrap: wrap(nn.LazyLinear(3)),
    "more than one element of": lambda wrap: wrap(expanded()),
    "SyncBatchNorm layers only work with GPU modules": lambda wrap: wrap(nn.SyncBatchNorm(2)),
    "device_ids": lambda wrap: wrap(mlp(), device_ids=[0]),
    "Cannot specify both process_group and device_mesh arguments.": lambda wrap: wrap(
        mlp(), process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (2,))
    ),
    "Only 1D device mesh is supported, but got": lambda wrap: wrap(
        mlp(), device_mesh=init_device_mesh("cpu", (1, 2))
    ),
    "Communication hook must be callable": lambda wrap: wrap(mlp()).register_comm_hook(None, 3),
    "Communication hook: bucket annotation should be": lambda wrap: wrap(mlp()).register_comm_hook(
        None, takes_int
    ),
    "Communication hook: return annotation should be": lambda wrap: wrap(mlp()).register_comm_hook(
        None, gives_int
    ),
    "register_builtin_comm_hook can only be called once": registered_twice,
    "sample rate should be equal or greater than 1": lambda wrap: wrap(
        mlp()
    )._set_ddp_runtime_logging_sample_rate(0),
    "should be called before training loop starts": static_too_late,
    "Expected to have finished reduction in the prior iteration": unfinished,
    "DDP Pickling/Unpickling are only supported": lambda wrap: pickle.dumps(
        wrap(mlp(), process_group=dist.new_group())
    ),
    "Param with name": lambda wrap: names(wrap, lambda parameters: parameters[1:]),
    "Expected param to name mapping": lambda wrap: names(
        wrap, lambda parameters: [*parameters, nn.Parameter(torch.ones(1))]
    ),
}


@on_ranks(2)
def test_errors_have_torchs_types_and_words(comm: Communicator) -> None:
    for words, attempt in WRONG.items():

        def error(wrap: Wrap, attempt: Callable[[Wrap], object] = attempt) -> BaseException:
            with pytest.raises(Exception) as raised:  # noqa: PT011
                attempt(wrap)
            return raised.value

        mine, theirs = ours_and_torchs(error)
        assert isinstance(mine, type(theirs)), words
        assert words in str(mine)
        assert words in str(theirs)
