"""torch's own tests of DistributedDataParallel, run on ours: the test bodies that come with torch,
unchanged, at 2 ranks. They are written for GPUs; here every device is the CPU."""

from __future__ import annotations

import inspect
import os
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import settings
from torch import nn
from torch.overrides import TorchFunctionMode

from ringdp import Communicator, DistributedDataParallel, SyncBatchNorm
from tests.parallel.ddp.cases import gloo

pytestmark = pytest.mark.process

ENVIRONMENT = {"BACKEND": "gloo", "WORLD_SIZE": "2"}
PROFILE = settings.get_current_profile_name()
with mock.patch.dict(os.environ, ENVIRONMENT, TEMP_DIR=tempfile.gettempdir()):
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed import distributed_test as torchs

    BASE = torchs.DistributedTest._DistTestBase
settings.load_profile(PROFILE)  # torch's tests have loaded their own profile

ABOUT = ("DistributedDataParallel", "DDP", "ddp", "SyncBatchNorm")
NOT_HERE = {
    "test_DistributedDataParallel_non_default_stream": "it works on a CUDA stream",
    "test_ddp_hook_parity_post_localSGD": "it makes a group for every CUDA device",
    "test_ddp_logging_data_gpu": "it reads device_ids",
    "test_SyncBatchNorm_process_group": "it takes a model of torchvision",
    "test_ddp_profiling_execution_trace": "it wants NCCL's events",
    "test_ddp_sync_bn_training_vs_eval": "torch skips it, too",
    "test_ddp_device": "it moves inputs to device_ids",
    "test_ddp_has_finalized": "it waits for NCCL's watchdog",
    "test_ddp_hook_pickling_powerSGD": "torch.load refuses what it has saved",
}
# Bodies that take long on a CPU: text to replace -> replacement.
SMALLER = {
    "test_ddp_uneven_inputs": {"dim = 1000": "dim = 20", "[2, 3, 10]": "[3]"},
    "test_ddp_compile_static_graph": {"compile(": "compile(backend='aot_eager', model="},
}


def source(name: str) -> str:
    return textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(BASE, name))))


def about_ddp() -> list[str]:
    names = [name for name in vars(BASE) if name.startswith("test_")]
    return [name for name in names if any(word in source(name) for word in ABOUT)]


class OursWithoutDevices(DistributedDataParallel):
    def __init__(
        self, module: nn.Module, device_ids: Any = None, output_device: Any = None, **more: Any
    ) -> None:
        """Ignores `device_ids` and `output_device`, which name GPUs."""
        super().__init__(module, **more)


class OnCPU(TorchFunctionMode):
    """Makes every device the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.device:
            return torch.device("cpu")
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if func is torch.Tensor.to:
            args = tuple(map(on_cpu, args))
        return func(*args, **kwargs)


def on_cpu(value: Any) -> Any:
    """`value`, or the CPU if it is a device."""
    named = isinstance(value, str) and value.startswith("cuda")
    number = isinstance(value, int) and not isinstance(value, bool)
    return torch.device("cpu") if named or number or isinstance(value, torch.device) else value


def patches(size: int) -> Iterator[AbstractContextManager[object]]:
    """Patches that replace torch's classes by ours, and GPUs, as many as ranks, by the CPU."""
    for room in (nn.parallel, nn.parallel.distributed, torchs):
        yield mock.patch.object(room, "DistributedDataParallel", OursWithoutDevices)
    yield mock.patch.object(nn, "SyncBatchNorm", SyncBatchNorm)
    to = nn.Module.to
    yield mock.patch.object(nn.Module, "to", lambda module, *a: to(module, *map(on_cpu, a)))
    yield mock.patch.object(nn.Module, "cuda", lambda module, *_: module)
    yield mock.patch.object(torchs, "HAS_TORCHVISION", False)  # its models take too long on a CPU
    yield mock.patch.object(torch.cuda, "is_available", return_value=False)
    yield mock.patch.object(torch.cuda, "device_count", return_value=size)
    yield mock.patch.object(torch.cuda, "current_device", return_value=0)
    yield mock.patch.object(torch.cuda, "device", return_value=nullcontext())
    for name in ("set_device", "synchronize"):
        yield mock.patch.object(torch.cuda, name)
    yield mock.patch.dict(os.environ, ENVIRONMENT)
    yield OnCPU()


def run(comm: Communicator, name: str) -> None:
    gloo()
    text, found = source(name), dict[str, Any]()
    for there, here in SMALLER.get(name, {}).items():
        assert there in text
        text = text.replace(there, here)
    exec(text, vars(torchs), found)  # without the body's decorators, which are skip conditions

    class Case(BASE, TestCase):  # type: ignore[misc, valid-type]
        rank, world_size = comm.rank, comm.size

        def _barrier(self, *_: Any, **__: Any) -> None:
            torch.distributed.barrier()

    torch.manual_seed(0)
    with ExitStack() as stack:
        for other in patches(comm.size):
            stack.enter_context(other)
        inspect.unwrap(found[name])(Case())


@pytest.mark.parametrize("name", about_ddp())
def test_a_test_body_of_torch_passes(ranks, name):
    if name in NOT_HERE:
        pytest.skip(NOT_HERE[name])
    ranks(2)(run, name)
