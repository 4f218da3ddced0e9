"""How a unit's flat buffers are cut into parameters, as views: whole, or what one rank keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ringdp.parallel import layout


class Slices(Protocol):
    """What a rank keeps of the parameters of one flat buffer: a unit's."""

    index: int
    rank: int
    plan: layout.Unit
    cut: Cut
    parameters: Sequence[nn.Parameter]


class Cut:
    """For `rank`, of parameters that have these shapes. `slices`: it keeps a shard of them."""

    def __init__(
        self, plan: layout.Unit, shapes: Sequence[torch.Size], rank: int, *, slices: bool
    ) -> None:
        self.plan, self.shapes, self.slices = plan, shapes, slices
        self.part = slice(rank * plan.shard, (rank + 1) * plan.shard)  # the rank's shard
        self.keeps = self.part if slices else slice(0, plan.padded)  # of a padded buffer
        self.spans = [plan.local(e, rank) for e in plan.entries]  # in that part

    def whole(self, buffer: Tensor) -> list[Tensor]:
        """The parameters, in their shapes, of a padded buffer."""
        return [
            buffer[e.offset : e.offset + e.elements].view(shape)
            for e, shape in zip(self.plan.entries, self.shapes, strict=True)
        ]

    def kept(self, buffer: Tensor) -> list[Tensor]:
        """Every parameter's part of what this rank keeps: a slice, or in its shape."""
        if not self.slices:
            return self.whole(buffer)
        return [buffer[begin:end] for begin, end in self.spans]

    def at_rest(self, buffer: Tensor) -> list[Tensor]:
        """Of a padded buffer the part of every parameter that it has between steps."""
        return self.kept(buffer[self.keeps])
