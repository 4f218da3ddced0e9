"""The test bodies of torch.distributed that come with torch, run unchanged on a rank of ours. Many
are written for GPUs; here every device is the CPU."""

from __future__ import annotations

import inspect
import os
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from unittest import mock

import torch
from hypothesis import settings
from torch import nn
from torch.overrides import TorchFunctionMode

from ringdp import Communicator

ENVIRONMENT = {"BACKEND": "gloo", "WORLD_SIZE": "2"}
PROFILE = settings.get_current_profile_name()
with mock.patch.dict(os.environ, ENVIRONMENT, TEMP_DIR=tempfile.gettempdir()):
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed import distributed_test as torchs

    BASE = torchs.DistributedTest._DistTestBase
settings.load_profile(PROFILE)  # torch's tests have loaded their own profile

ABOUT_DDP = ("DistributedDataParallel", "DDP", "ddp", "SyncBatchNorm")


def source(name: str) -> str:
    return textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(BASE, name))))


def names(*, about_ddp: bool) -> list[str]:
    found = [name for name in vars(BASE) if name.startswith("test_")]
    return [name for name in found if about_ddp == any(word in source(name) for word in ABOUT_DDP)]


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
    """Patches that replace GPUs, as many as ranks, by the CPU."""
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
    yield mock.patch.dict(os.environ, ENVIRONMENT, WORLD_SIZE=str(size))
    yield OnCPU()


def run_body(comm: Communicator, name: str, changes: Mapping[str, str]) -> None:
    """Runs the body `name` over torch's default group, with `changes`: text -> replacement."""
    text, found = source(name), dict[str, Any]()
    for there, here in changes.items():
        assert there in text
        text = text.replace(there, here)

    class Case(BASE, TestCase):  # type: ignore[misc, valid-type]
        rank, world_size = comm.rank, comm.size

        def _barrier(self, *_: Any, **__: Any) -> None:
            torch.distributed.barrier()

    torch.manual_seed(0)
    with ExitStack() as stack:
        for other in patches(comm.size):
            stack.enter_context(other)
        exec(text, vars(torchs), found)
        inspect.unwrap(found[name])(Case())  # without its decorators, which are skip conditions
