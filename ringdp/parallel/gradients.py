"""The memory of one unit's gradients: what is reduced, and what the optimizer reads."""

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
    """`bucket`: what is reduced, None where one is made each time. `reduced`: what the optimizer
    reads. In stages 0 and 1 the latter may be (a part of) the former."""

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
        """The gradient of each parameter, in the shape that it has between steps."""
        return self.cut.kept(self.reduced)

    def leave_held(self, own: Sequence[Tensor]) -> None:
        """Take other memory where somebody holds some of this, beside the p.grad that are `own`.
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
        self.reduced.zero_()  # the padding of it stays so: norms are of all
        self._alone = holders(self.reduced)
