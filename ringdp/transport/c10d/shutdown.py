"""How a rank over gloo leaves its group, and how it notices that another rank has left or died.

A rank that closes records it in the store before it drops its connections; if they drop without
that record, its peers count it as lost. A gloo wait cannot be cancelled: it ends only with the
group's connections.
"""

from __future__ import annotations

import os
import threading
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
from ringdp.transport.store.failures import Failures
from ringdp.transport.store.status import StatusBoard

SHORTEST = timedelta(milliseconds=1)


def watch_for_end(group: ProcessGroup, failures: Failures, rank: int) -> None:
    """Wait until that rank's connection drops, and report the rank as LOST unless it has closed."""
    try:
        group.recv([torch.empty(1, device="cpu")], rank, ENDS).wait(wire.LONG)
    except RuntimeError:
        with suppress(DistError):  # the store has gone too, which waiting threads will notice
            while failures.failure is None:
                with suppress(StoreSilent):  # ask again
                    if not failures.has_closed(rank):
                        failures.fail(FailureKind.LOST, rank)
                    return


def retire(
    failures: Failures,
    board: StatusBoard,
    store: StoreClient,
    queues: Sequence[threads.Queue],
    group: ProcessGroup,
    sending: threads.Living[threading.Thread],
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
    begun = list(sending)
    with suppress(RuntimeError):  # at exit no thread starts, and C10dTransport.end cuts by itself
        threads.spawn(partial(_cut_after, group, begun), "ringdp-c10d")


def _cut_after(group: ProcessGroup, sending: list[threading.Thread]) -> None:
    """Cut the connections once these threads have sent their messages."""
    for thread in sending:
        thread.join()
    cut(group)


def cut(group: ProcessGroup) -> None:
    """End all waits and connections of this rank, which gloo does once one wait has timed out."""
    if group.size() > 1:
        with suppress(RuntimeError):
            neighbour = (group.rank() + 1) % group.size()
            group.recv([torch.empty(1, device="cpu")], neighbour, CUT).wait(SHORTEST)


def hold(parts: list[Work]) -> None:
    """Keep a message alive until it has been sent. If sending fails, only the receiver notices."""
    with suppress(RuntimeError):
        for part in parts:
            part.wait(wire.LONG)
