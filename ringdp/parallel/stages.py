"""DDP and ZeRO-1, 2, 3 as rows of one table: what a rank keeps, and which collectives that takes.

    stage  parameters  gradients  optimizer   gathers   after a unit's backward
      0    full        full       full        0         all_reduce
      1    full        full       shard       1         reduce_scatter
      2    full        shard      shard       1         reduce_scatter
      3    shard       shard      shard       2         reduce_scatter

`gathers` are all_gathers per unit and step: before the next forward (stages 1, 2), or before each
unit's forward and again before its backward (stage 3; but see `formula.traffic`). Rajbhandari et
al. 2020 (ZeRO).
"""

from __future__ import annotations

from enum import Enum
from typing import Literal, NamedTuple

from ringdp.errors import UsageError


class Keep(Enum):
    """What one rank holds of a flat buffer: all of it, or 1/n."""

    FULL = "full"
    SHARD = "shard"


class Stage(NamedTuple):
    number: int
    parameters: Keep
    gradients: Keep
    optimizer: Keep
    gathers: int

    @property
    def slices(self) -> bool:
        """Whether parameters are, between uses, the slices that this rank's optimizer steps."""
        return self.optimizer is Keep.SHARD

    @property
    def freed(self) -> bool:
        """Whether gathered parameters are freed after their use."""
        return self.parameters is Keep.SHARD

    @property
    def reduction(self) -> Literal["all_reduce", "reduce_scatter"]:
        """A sharded optimizer needs the gradients of its own shard only."""
        return "reduce_scatter" if self.slices else "all_reduce"


STAGES = (
    Stage(0, Keep.FULL, Keep.FULL, Keep.FULL, 0),
    Stage(1, Keep.FULL, Keep.FULL, Keep.SHARD, 1),
    Stage(2, Keep.FULL, Keep.SHARD, Keep.SHARD, 1),
    Stage(3, Keep.SHARD, Keep.SHARD, Keep.SHARD, 2),
)


def stage_of(number: int) -> Stage:
    """The stage with that number. Raises UsageError for any but 0..3."""
    if type(number) is int and 0 <= number < len(STAGES):
        return STAGES[number]
    raise UsageError(f"stage is {number!r}; it must be 0 (DDP), 1, 2 or 3 (ZeRO)")
