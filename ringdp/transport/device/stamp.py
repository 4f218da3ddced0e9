"""The stamp that a rank sends its neighbour before a collective over NCCL: which one it has called.

NCCL's messages carry only data: ranks that call different collectives hang, or get garbage. So
before its data every rank sends its call over NCCL to the next rank in a ring. If all neighbours
agree, all ranks do. A stamp is STAMP_BYTES bytes:

    number, digest, kind, elements (int64 each)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringdp.transport.base import Stamped

STAMP_BYTES = 4 * 8


def packed(stamped: Stamped) -> Tensor:
    """The stamp as uint8[STAMP_BYTES] on the CPU."""
    number, kind, elements, _ = stamped.call
    return torch.tensor([number, stamped.digest, kind, elements]).view(torch.uint8)


def unpacked(data: Tensor) -> Stamped:
    """The stamp in a peer's bytes, whatever they are. It lacks the user's source line, which the
    ranks' records hold."""
    number, digest, kind, elements = data.view(torch.int64).tolist()
    return Stamped((number, kind, elements, b""), digest)
