"""What each collective means: the symbolic value of every slot before and after it.

The value of a slot is the set of inputs summed into it; an input is named by the slot (rank, chunk)
that held it. A slot that is not listed is undefined before and arbitrary after. Rank r owns the
chunks c with c // (chunks / n) == r, so its shard is contiguous. all_to_all exchanges shards in
place; in all_to_all_v chunk s * n + d goes from rank s to rank d.
"""

from __future__ import annotations

from typing import NamedTuple

from ringdp.errors import ScheduleError
from ringdp.schedule.algorithms import Collective, check_collective

Slot = tuple[int, int]  # (rank, chunk)
Value = frozenset[Slot]
State = dict[Slot, Value]


class Contract(NamedTuple):
    before: State
    after: State

    def kept(self, rank: int) -> list[int]:
        """Return the rank's chunks whose final values matter: no other needs a store (`fuse`)."""
        return [c for r, c in self.after if r == rank]


def contract(collective: Collective, n: int, chunks: int, root: int = 0) -> Contract:
    """Return the contract of `collective` over n ranks. `root` only matters if it has a root.

    Raises UsageError if the collective is unknown or n < 1, and ScheduleError if it cannot have so
    many chunks.
    """
    check_collective(collective, n)
    if collective == "all_to_all_v":  # its tables of all slots would have n^3 entries
        if chunks != n * n:
            raise ScheduleError(f"{collective} over {n} ranks needs {n * n} chunks: {chunks}")
        sent = {c: frozenset({(c // n, c)}) for c in range(chunks)}
        return Contract({(c // n, c): sent[c] for c in sent}, {(c % n, c): sent[c] for c in sent})
    slots = [(r, c) for r in range(n) for c in range(chunks)]
    own = {slot: frozenset({slot}) for slot in slots}
    total = [frozenset[Slot]().union(*(own[q, c] for q in range(n))) for c in range(chunks)]
    whole = {(root, c): own[root, c] for c in range(chunks)}
    match collective:  # those without shards
        case "all_reduce":
            return Contract(own, {(r, c): total[c] for r, c in slots})
        case "broadcast":
            return Contract(whole, {(r, c): own[root, c] for r, c in slots})
        case "reduce":
            return Contract(own, {(root, c): total[c] for c in range(chunks)})
    if chunks % n:
        raise ScheduleError(
            f"{collective} over {n} ranks needs a multiple of {n} chunks, not {chunks}"
        )
    each = chunks // n
    shards = {(c // each, c): own[c // each, c] for c in range(chunks)}
    match collective:
        case "reduce_scatter":
            return Contract(own, {slot: total[slot[1]] for slot in shards})
        case "all_gather":
            return Contract(shards, {(r, c): own[c // each, c] for r, c in slots})
        case "scatter":
            return Contract(whole, {(r, c): own[root, c] for r, c in shards})
        case "gather":
            return Contract(shards, {(root, c): own[c // each, c] for c in range(chunks)})
        case "all_to_all":
            return Contract(own, {(r, c): own[c // each, r * each + c % each] for r, c in slots})
