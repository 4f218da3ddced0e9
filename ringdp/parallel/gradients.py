"""The memory of one unit's gradients: the bucket that is reduced, and what the optimizer reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringdp.parallel.cut import Cut
from ringdp.parallel.memory import Ledger, Widths, holders
from ringdp.parallel.offload import Offload
from ringdp.parallel.precision import Dtypes
from ringdp.parallel.stages import Stage


class Gradients:
    """`bucket`: [padded], reduced over the ranks; None if one is allocated for each reduction.
    `reduced`: [shard] or [padded], what the optimizer reads, which may be a view of the bucket."""

    def __init__(
        self,
        cut: Cut,
        stage: Stage,
        dtypes: Dtypes,
        widths: Widths,
        offload: Offload,
        ledger: Ledger,
        device: torch.device,
    ) -> None:
        self.cut, self.stage, self.dtypes, self.widths = cut, stage, dtypes, widths
        self.offload, self.ledger, self.device = offload, ledger, device
        self._make()

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

    def leave_held(self, own: Sequence[Tensor]) -> None:
        """Move to other memory if the user holds tensors in this one, besides the p.grad in `own`.
        See Note [gradients live in their bucket], in `ddp.bucket`."""
        memory = self.reduced.untyped_storage()._cdata
        here = sum(t.untyped_storage()._cdata == memory for t in own)
        if holders(self.reduced) > self._alone + here:
            self.ledger.give("gradients", self.widths.gradients(self.cut.plan, self.stage))
            self._make()

    def _make(self) -> None:
        plan, width, part = self.cut.plan, self.widths, self.cut.keeps
        master, device = self.dtypes.master, self.device
        self.bucket: Tensor | None = None
        if not width.trainable:
            self.reduced = torch.empty(0, dtype=master, device=device)
            return
        size = part.stop - part.start
        if width.keeps_bucket(self.stage):
            self.bucket = self.ledger.empty("gradients", plan.padded, self.dtypes.reduce, device)
        if self.bucket is not None and width.own:
            self.reduced = self.bucket[part]
        elif self.offload.any:
            self.reduced = self.offload.empty(size, master)
            self.ledger.take("gradients", self.reduced.nbytes)
        else:
            self.reduced = self.ledger.empty("gradients", size, master, device)
        self.reduced.zero_()  # the padding stays zero: norms are taken over everything
        self._alone = holders(self.reduced)
