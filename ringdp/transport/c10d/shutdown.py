"""How a rank over gloo leaves its group, and how it notices that another rank has left or died.

A rank that closes records it in the store before it drops its connections; if they drop without
that record, its peers count it as lost. A gloo wait cannot be cancelled: it ends only with the
group's connections.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
from torch.distributed import DistError, ProcessGroup, Work

from ringdp.transport import threads
from ringdp.transport.base import FailureKind
from ringdp.transport.c10d import wire
from ringdp.transport.c10d.wire import CUT, ENDS
from ringdp.transport.store.client import StoreClient, StoreSilent
from ringdp.transport.store.failures import Failed, Failures
from ringdp.transport.store.status import StatusBoard

BATCH = 16  # messages of up to 64 KiB each
SHORTEST = timedelta(milliseconds=1)


class Sending:
    """Messages that no caller waits for: kept alive until they have been sent, also at the end.

    Memory that gloo is to send must stay, and the end of a send can only be waited for. A thread
    waits for BATCH of them: one for each would take the interpreter's lock from the sender.
    """

    def __init__(self) -> None:
        self._begun = deque[list[Work]]()
        self._waits = set[object]()  # of threads in `hold`
        self._waited = threads.Bell()
        self.add = self._begun.append  # a C call

    def is_full(self) -> bool:
        """Return whether it is time to `hold`."""
        return len(self._begun) >= BATCH

    def hold(self, timeout: timedelta = wire.LONG) -> None:
        """Wait until what has been added is sent. A timeout ends all connections."""
        here, taken = object(), list[Work]()
        self._waits.add(here)
        with suppress(IndexError):
            while True:
                taken += self._begun.popleft()
        for part in taken:
            with suppress(RuntimeError):  # only the receiver notices
                part.wait(timeout)
        self._waits.discard(here)
        self._waited.ring()

    def until_sent(self, timeout: timedelta = wire.LONG) -> None:
        self.hold(timeout)
        self._waited.wait_for(lambda: not self._waits, timeout.total_seconds())


def watch_for_end(group: ProcessGroup, failures: Failures, rank: int) -> None:
    """Wait until that rank's connection drops, and report the rank as LOST unless it has closed."""
    try:
        group.recv([torch.empty(1, device="cpu")], rank, ENDS).wait(wire.LONG)
    except RuntimeError:
        with suppress(DistError):  # the store has gone too, which waiting threads will notice
            while failures.failure is None:
                with suppress(StoreSilent):  # ask again
                    if not failures.has_closed(rank):
                        failures.fail(Failed(FailureKind.LOST, rank))
                    return


def retire(
    failures: Failures,
    board: StatusBoard,
    store: StoreClient,
    queues: Sequence[threads.Queue],
    group: ProcessGroup,
    sending: Sending,
    process: int,
) -> None:
    """End this rank's part: publish its last status, then end its threads and connections."""
    if os.getpid() != process:
        return
    with suppress(DistError):
        board.publish_last(closed=True)
    failures.close(board.state().record.finished)
    for queue in queues:
        queue.end()
    store.end()
    with suppress(RuntimeError):  # at exit no thread starts, and C10dTransport.end cuts by itself
        threads.spawn(partial(_cut_after, group, sending), "ringdp-c10d")


def _cut_after(group: ProcessGroup, sending: Sending) -> None:
    """Cut the connections once all messages have been sent."""
    sending.until_sent()
    cut(group)


def cut(group: ProcessGroup) -> None:
    """End all waits and connections of this rank, which gloo does once one wait has timed out."""
    if group.size() > 1:
        with suppress(RuntimeError):
            neighbour = (group.rank() + 1) % group.size()
            group.recv([torch.empty(1, device="cpu")], neighbour, CUT).wait(SHORTEST)
