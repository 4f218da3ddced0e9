"""How a unit's flat buffers are cut into views: whole parameters, or what one rank keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ringdp.comm import Communicator
from ringdp.parallel import layout


class Slices(Protocol):
    """This rank's slices of the parameters of one flat buffer, such as a unit's."""

    index: int
    plan: layout.Unit
    cut: Cut
    parameters: Sequence[nn.Parameter]


class SliceOwner(Protocol):
    """What can reach the other ranks' slices: an engine."""

    shards: Communicator  # of the ranks that have them
    closed: bool

    @property
    def units(self) -> Sequence[Slices]: ...

    @property
    def gathers_state(self) -> bool: ...

    def check_reduced(self, what: str) -> None: ...


class Cut:
    """Views of a unit's flat buffers on `rank`. `slices`: it keeps a shard, not everything."""

    def __init__(
        self, plan: layout.Unit, shapes: Sequence[torch.Size], rank: int, *, slices: bool
    ) -> None:
        self.plan, self.shapes, self.slices = plan, shapes, slices
        self.part = slice(rank * plan.shard, (rank + 1) * plan.shard)  # the rank's shard
        self.keeps = self.part if slices else slice(0, plan.padded)  # of [padded]
        self.spans = [plan.local(e, rank) for e in plan.entries]  # of each parameter in the shard
        self.parts = [plan.part(e, rank) for e in plan.entries]  # of the shard in each parameter

    def whole(self, buffer: Tensor) -> list[Tensor]:
        """All parameters in their shapes. `buffer`: [padded]."""
        return [
            buffer[e.offset : e.offset + e.elements].view(shape)
            for e, shape in zip(self.plan.entries, self.shapes, strict=True)
        ]

    def kept(self, buffer: Tensor) -> list[Tensor]:
        """What this rank keeps of each parameter: a 1-D slice, or all of it in its shape. `buffer`:
        [shard], or [padded] if it keeps all."""
        if not self.slices:
            return self.whole(buffer)
        return [buffer[begin:end] for begin, end in self.spans]
