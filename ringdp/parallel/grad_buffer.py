"""A unit's flat gradient buffer, filled one gradient at a time.

Each gradient is scaled, cast and moved in as soon as autograd makes it, so that never more than one
exists outside the buffer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringdp.errors import UsageError
from ringdp.kernels.precision import scaled_copy
from ringdp.parallel.layout import Unit


class GradBuffer:
    """`flat`: [plan.padded], uninitialized. `scale`: factor applied to every gradient."""

    def __init__(self, plan: Unit, flat: Tensor, scale: float = 1.0) -> None:
        self.plan, self.flat, self.scale = plan, flat, scale
        self._there: set[int] = set()  # entries that have a gradient

    def take(self, at: int, gradient: Tensor) -> None:
        """Move in, or add, a gradient of the plan's entry `at`. Raises UsageError if sparse."""
        if gradient.layout is not torch.strided:
            raise UsageError(
                f"parameter {self.plan.entries[at].name} got a sparse gradient, which flat buffers "
                "have no room for; make its module with sparse=False"
            )
        gradient = gradient.detach()  # create_graph makes gradients with a history
        part = self.part(at).view(gradient.shape)
        if at in self._there:
            part.add_(gradient, alpha=self.scale)
        else:
            scaled_copy(gradient, part, self.scale)
            self._there.add(at)

    def part(self, at: int) -> Tensor:
        entry = self.plan.entries[at]
        return self.flat.narrow(0, entry.offset, entry.elements)

    def whole(self) -> Tensor:
        """`flat`, with zeros in the padding and where no gradient came."""
        for at in range(len(self.plan.entries)):
            if at not in self._there:
                self.part(at).zero_()
        for begin, end in self.plan.gaps:
            self.flat[begin:end].zero_()
        return self.flat
