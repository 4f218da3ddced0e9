"""Launches of an earlier call, repeated for tensors at the same addresses.

csrc/launches.hpp says why, and does it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringdp import _core

KEPT = 1024  # calls of a function
KEPT_BYTES = 16 << 20  # of their tensors on devices; the last call's are always kept


class Repeats(_core.Repeats):
    """The launches of a function's calls."""

    def __init__(self) -> None:
        table = Tensor.__dlpack_c_exchange_api__
        super().__init__(table, Tensor, torch.nn.Parameter, KEPT, KEPT_BYTES)
        # torch.compile calls C++'s methods without the object, but not what the object has.
        self.again, self.keep = super().again, super().keep  # type: ignore[method-assign]
