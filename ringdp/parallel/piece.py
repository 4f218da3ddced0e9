"""What a rank keeps of a gathered unit, from its forward to the end of backward.

With a `reshard_size` (see `ranks`) so many ranks keep all of the unit together. Backward gathers it
among them, with the values of the forward, unless the slices were written to.
"""

from __future__ import annotations

from torch import Tensor

from ringdp.comm import Communicator, Work
from ringdp.parallel.accounting.memory import Ledger


class Piece:
    """`near`: the ranks that keep the unit; None if nothing is kept. `kept`: [padded / near.size]
    in the compute dtype, this rank's part, or None."""

    def __init__(self, near: Communicator | None, ledger: Ledger) -> None:
        self.near, self._ledger = near, ledger
        self.kept: Tensor | None = None

    def keep(self, full: Tensor) -> None:
        """Keep this rank's part of the unit, [padded], if it has none."""
        if self.near and self.kept is None:
            elements = len(full) // self.near.size
            kept = self._ledger.empty("gathered", elements, full.dtype, self.near)
            begin = self.near.rank * elements
            self.kept = kept.copy_(full[begin : begin + elements])

    def gather(self, full: Tensor, tag: int) -> Work | None:
        """Start to gather the unit into `full`, [padded]; None if nothing was kept. Collective."""
        if self.near and self.kept is not None:
            return self.near.all_gather(full, self.kept, async_op=True, tag=tag)
        return None

    def forget(self) -> None:
        """Free what was kept: the unit's next gather is of all its shards."""
        if self.kept is not None:
            self._ledger.give("gathered", self.kept.nbytes)
            self.kept = None
