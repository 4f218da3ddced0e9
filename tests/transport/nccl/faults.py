"""When tests over the host NCCL run, and the faults that it injects (csrc/nccl/fault.hpp)."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec

import pytest
import torch

from ringdp.transport.nccl.library import HOST

NONE, FAIL, STALL, LOSE = range(4)
REMOTE_ERROR = 6  # ncclResult_t

LACKS_HOST_NCCL = bool(torch.version.cuda) or find_spec("cupy_backends") is None
WHY = "the host NCCL needs CuPy, and a torch that has loaded no NCCL itself"
needs_host_nccl = pytest.mark.skipif(LACKS_HOST_NCCL, reason=WHY)


def only_with_host_nccl() -> None:
    """Skips the test, or the whole file if called at its top, where the host NCCL cannot be
    loaded."""
    if LACKS_HOST_NCCL:
        pytest.skip(WHY, allow_module_level=True)


def fault(what: int, launches: int = 0) -> None:
    """Makes a launch of this process fail, after `launches` more that succeed."""
    assert ctypes.CDLL(str(HOST)).hostNcclFault(what, launches, REMOTE_ERROR) == 0


def fault_is_due() -> bool:
    """Whether the launch that is to fail is still to come."""
    return bool(ctypes.CDLL(str(HOST)).hostNcclFaultIsDue())
