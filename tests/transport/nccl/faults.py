"""What tests over the host NCCL share: when they run, and its faults (csrc/nccl/fault.hpp)."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec

import pytest
import torch

from ringdp.transport.nccl.library import HOST

NONE, FAIL, STALL, LOSE = range(4)


LACKS_HOST_NCCL = bool(torch.version.cuda) or find_spec("cupy_backends") is None
WHY = "the host NCCL needs CuPy, and a torch that has loaded no NCCL itself"
needs_host_nccl = pytest.mark.skipif(LACKS_HOST_NCCL, reason=WHY)


def only_with_host_nccl() -> None:
    """Skips the test, or from its top the file, where the host NCCL cannot be loaded."""
    if LACKS_HOST_NCCL:
        pytest.skip(WHY, allow_module_level=True)


def fault(what: int, launches: int = 0, result: int = 6) -> None:
    """After so many launches of this process that go well: what happens to the one behind them.

    `result`: an ncclResult_t, by default that of a remote error.
    """
    assert ctypes.CDLL(str(HOST)).hostNcclFault(what, launches, result) == 0


def fault_is_due() -> bool:
    """Whether the launch that it happens to is still to come."""
    return bool(ctypes.CDLL(str(HOST)).hostNcclFaultIsDue())
