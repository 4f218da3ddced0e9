"""What tests over the host NCCL share: when they run, and its faults (csrc/nccl/fault.hpp)."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec

import pytest
import torch

from ringdp.transport.nccl.library import HOST

NONE, FAIL, STALL, LOSE = range(4)


def only_with_host_nccl() -> None:
    """For the top of a test file: skips it where the host NCCL cannot be loaded."""
    if find_spec("cupy_backends") is None:
        pytest.skip("the NCCL transport needs CuPy", allow_module_level=True)
    if torch.version.cuda:
        pytest.skip("this torch has loaded NCCL itself", allow_module_level=True)


def fault(what: int, launches: int = 0, result: int = 6) -> None:
    """After so many launches of this process that go well: what happens to the one behind them.

    `result`: an ncclResult_t, by default that of a remote error.
    """
    assert ctypes.CDLL(str(HOST)).hostNcclFault(what, launches, result) == 0


def fault_is_due() -> bool:
    """Whether the launch that it happens to is still to come."""
    return bool(ctypes.CDLL(str(HOST)).hostNcclFaultIsDue())
