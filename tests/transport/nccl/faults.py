"""Faults of the host NCCL on request, see csrc/nccl/fault.hpp."""

from __future__ import annotations

import ctypes

from ringdp.transport.nccl.library import HOST

FAIL, STALL, LOSE = 1, 2, 3


def fault(what: int, launches: int = 0, result: int = 6) -> None:
    """After so many launches of this process that go well: what happens to the one behind them.

    `result`: an ncclResult_t, by default that of a remote error.
    """
    assert ctypes.CDLL(str(HOST)).hostNcclFault(what, launches, result) == 0
