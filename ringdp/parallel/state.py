"""The states of a unit, and what its memory holds in each."""

from __future__ import annotations

from enum import Enum, auto


class State(Enum):
    """
    SHARDED --gather--> GATHERING --unshard--> UNSHARDED --reshard--> SHARDED
    UNSHARDED --set_aside--> GATHERING --drop--> SHARDED
    SHARDED --summon--> SUMMONED --dismiss--> SHARDED

    In stage 0 a unit is always UNSHARDED instead of SHARDED, unless its masters are apart.
    """

    SHARDED = auto()
    """The parameters are flat slices of this rank's master shard (in stage 0: whole masters), which
    the optimizer may step. Stages 1 and 2 keep the full buffer, where the other ranks' shards are
    out of date; stage 3 has freed it, but for its `piece`."""
    GATHERING = auto()
    """As SHARDED, and an all_gather fills the full buffer (in stage 3, what becomes its memory), or
    it has the last use's values."""
    UNSHARDED = auto()
    """The modules' parameters are views of the full buffer, in their own shapes."""
    SUMMONED = auto()
    """The parameters are views of a full buffer of masters, in their own shapes, allocated for this
    alone, so that a state_dict may keep it."""
