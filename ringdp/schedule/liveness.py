"""Decides whether programs can stall when every rank runs its rows in order over bounded FIFOs.

Each row is one event, its completion. It comes after the previous row, after the row that sent what
it receives, and after the row that freed the slot it sends into (the receive `depth` messages
earlier on that channel). The programs finish iff these events have a topological order. A streaming
row holds its incoming slot until it has sent.

A depth that suffices for one pass suffices for any number, since passes can run one after another.
Executors that post whole rounds at once cannot stall and do not need this check.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from graphlib import CycleError, TopologicalSorter

from ringdp.errors import ScheduleError
from ringdp.schedule.program import NONE, Program

Event = tuple[int, int]  # (rank, row)
Channels = dict[tuple[int, int], list[Event]]  # by (sender, receiver)


def fifo_depth(programs: Sequence[Program]) -> int:
    """Return the least number of slots per channel with which `programs` cannot stall (at least 1).

    Raises ScheduleError if no depth suffices: sends and receives do not match, or the ranks wait
    in a cycle.
    """
    sends, receives = _channels(programs)
    most = max((len(s) for s in sends.values()), default=1)
    ends = partial(_ends, programs, sends, receives)
    enough = 1
    while not ends(enough):
        if enough >= most:
            raise ScheduleError("the ranks wait for one another in a cycle at any FIFO depth")
        enough *= 2
    return bisect_left(range(enough), True, lo=enough // 2 + 1, key=ends)


def fits(programs: Sequence[Program], depth: int) -> bool:
    """Return whether `programs` cannot stall with `depth` slots per channel.

    Raises ScheduleError if sends and receives do not match.
    """
    return _ends(programs, *_channels(programs), depth)


def _channels(programs: Sequence[Program]) -> tuple[Channels, Channels]:
    """Return the sends and the receives of every channel, in order."""
    sends: Channels = defaultdict(list)
    receives: Channels = defaultdict(list)
    for p in programs:
        for i, row in enumerate(p):
            if row.send_peer != NONE:
                sends[p.rank, row.send_peer].append((p.rank, i))
            if row.recv_peer != NONE:
                receives[row.recv_peer, p.rank].append((p.rank, i))
    for channel in sends.keys() | receives.keys():
        sent, received = len(sends[channel]), len(receives[channel])
        if sent != received:
            raise ScheduleError(
                f"rank {channel[0]} sends {sent} messages to rank {channel[1]}, which receives "
                f"{received}"
            )
    return sends, receives


def _ends(programs: Sequence[Program], sends: Channels, receives: Channels, depth: int) -> bool:
    """Return whether all events have a topological order."""
    events = TopologicalSorter[Event]()
    for p in programs:
        for i in range(1, len(p.rows)):
            events.add((p.rank, i), (p.rank, i - 1))
    for channel, sent in sends.items():
        for m, event in enumerate(sent):
            events.add(receives[channel][m], event)
            if m >= depth:
                events.add(event, receives[channel][m - depth])
    try:
        events.prepare()
    except CycleError:
        return False
    return True
