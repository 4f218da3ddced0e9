"""One unit's gradients: the flat buffer that they fill, and the memory that the optimizer reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringdp.errors import UsageError
from ringdp.kernels.precision import scaled_copy
from ringdp.kernels.spans import gaps
from ringdp.parallel import layout
from ringdp.parallel.accounting.memory import Ledger, Widths, holders
from ringdp.parallel.cut import Cut
from ringdp.parallel.precision import Dtypes
from ringdp.parallel.stages import Stage


class GradBuffer:
    """A flat buffer, filled one gradient at a time: each is scaled, cast and moved in as soon as
    autograd makes it, so that never more than one exists outside.

    `flat`: [plan.padded], uninitialized. `scale`: factor applied to every gradient."""

    def __init__(self, plan: layout.Unit, flat: Tensor, scale: float = 1.0) -> None:
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
        there = [self.plan.entries[at] for at in self._there]
        sizes, offsets = [e.elements for e in there], [e.offset for e in there]
        for begin, end in gaps(sizes, offsets, self.plan.padded):
            self.flat[begin:end].zero_()
        return self.flat


class Gradients:
    """`bucket`: [padded], reduced over the ranks; None if one is allocated for each reduction.
    `reduced`: [shard] or [padded], what the optimizer reads, which may be a view of the bucket."""

    def __init__(
        self, cut: Cut, stage: Stage, dtypes: Dtypes, widths: Widths, ledger: Ledger
    ) -> None:
        self.cut = cut
        self.bucket: Tensor | None = None
        if not widths.trainable:
            self.reduced = torch.empty(0, dtype=dtypes.master, device=ledger.device)
            return
        size = cut.keeps.stop - cut.keeps.start
        if widths.keeps_bucket(stage):
            self.bucket = ledger.empty("gradients", cut.plan.padded, dtypes.reduce)
        if self.bucket is not None and widths.own:
            self.reduced = self.bucket[cut.keeps]
        elif ledger.offload.any:
            self.reduced = ledger.offload.empty(size, dtypes.master)
            ledger.take("gradients", self.reduced.nbytes)
        else:
            self.reduced = ledger.empty("gradients", size, dtypes.master)
        self.reduced.zero_()  # the padding stays zero: norms are taken over everything
        self._alone = holders(self.reduced)

    def views(self) -> list[Tensor]:
        """The gradient of each parameter, in the shape that the parameter has between steps."""
        return self.cut.kept(self.reduced)

    def store(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Copy in gradients that lie elsewhere; zeros for None. Returns `views`."""
        views = self.views()
        for view, gradient in zip(views, gradients, strict=True):
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() != view.data_ptr():  # the user's own tensor
                view.copy_(gradient)
        return views

    def are_held(self, own: Sequence[Tensor]) -> bool:
        """Whether the user holds tensors in this memory, besides the p.grad in `own`. See Note
        [gradients live in their bucket], in `ddp.bucket`."""
        memory = self.reduced.untyped_storage()._cdata
        here: int = sum(t.untyped_storage()._cdata == memory for t in own)
        return holders(self.reduced) > self._alone + here
