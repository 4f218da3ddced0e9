"""What ranks tell their neighbour at the start of a collective: which one they have called, where.

What NCCL sends carries nothing but data: ranks that call different things hang, or get garbage. So
before its data every rank sends its call to the next rank of a circle, in the same way. If all
neighbours agree then all ranks do. A stamp is STAMP_BYTES bytes:

    number, digest, kind, elements (int64 each) | the user's file:line in SITE_BYTES
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from ringdp.transport.base import Stamp
from ringdp.transport.records import SITE_BYTES, Call

NUMBERS = Struct("=4q")
STAMP_BYTES = NUMBERS.size + SITE_BYTES


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
    number, kind, elements, site = stamped.call
    data = bytearray(NUMBERS.pack(number, stamped.digest, kind, elements) + site)
    return torch.frombuffer(data, dtype=torch.uint8)


def unpacked(data: Tensor) -> Stamped:
    """Of whatever a peer has sent."""
    found = data.numpy().tobytes()
    number, digest, kind, elements = NUMBERS.unpack_from(found)
    return Stamped((number, kind, elements, found[NUMBERS.size :]), digest)
