"""What ranks tell their neighbour before a collective over NCCL: which one they have called.

What NCCL sends carries nothing but data: ranks that call different things hang, or get garbage. So
before its data every rank sends its call to the next rank of a circle, in the same way. If all
neighbours agree then all ranks do. A stamp is STAMP_BYTES bytes:

    number, digest, kind, elements (int64 each)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ringdp.transport.base import Stamp
from ringdp.transport.records import Call

STAMP_BYTES = 4 * 8


class Stamped(NamedTuple):
    """`digest`: of the kinds of this collective and all before it."""

    call: Call
    digest: int

    @property
    def short(self) -> Stamp:
        number, _, elements, _ = self.call
        return number, self.digest, elements


def packed(stamped: Stamped) -> Tensor:
    """uint8[STAMP_BYTES], on the CPU."""
    number, kind, elements, _ = stamped.call
    return torch.tensor([number, stamped.digest, kind, elements]).view(torch.uint8)


def unpacked(data: Tensor) -> Stamped:
    """Of whatever a peer has sent. The user's line is not in it: the ranks' records say that."""
    number, digest, kind, elements = data.view(torch.int64).tolist()
    return Stamped((number, kind, elements, b""), digest)
