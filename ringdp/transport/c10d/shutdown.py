"""How a rank over gloo ends its part in a group, and how it sees that another has.

A rank that ends says so in the store before its connections go: who sees them go without that word
has lost it. Gloo's waits have an end of their own only when the group's has come.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from weakref import WeakSet

import torch
from torch.distributed import DistError

from ringdp.transport import threads
from ringdp.transport.base import FailureKind
from ringdp.transport.c10d import wire
from ringdp.transport.c10d.wire import CUT, ENDS
from ringdp.transport.store.client import StoreClient, StoreSilent
from ringdp.transport.store.failures import Failures
from ringdp.transport.store.status import StatusBoard

SHORTEST = timedelta(milliseconds=1)


def until_it_ends(group: wire.Group, failures: Failures, rank: int) -> None:
    try:
        group.recv([torch.empty(1)], rank, ENDS).wait(wire.LONG)
    except RuntimeError:
        with suppress(DistError):  # the store has gone too: who waits will see it
            while failures.failure is None:
                with suppress(StoreSilent):  # it is asked again
                    if not failures.left(rank):
                        failures.fail(FailureKind.LOST, rank)
                    return


def retire(
    failures: Failures,
    board: StatusBoard,
    store: StoreClient,
    queues: Sequence[threads.Queue],
    group: wire.Group,
    sending: WeakSet[threading.Thread],
    process: int,
) -> None:
    if os.getpid() != process:
        return
    with suppress(DistError):
        board.last_word(closed=True)
    failures.leave(board.state().record.finished)
    for queue in queues:
        queue.end()
    store.end()
    with suppress(RuntimeError):  # at exit no thread can be started, and who ends there cuts itself
        threads.spawn(partial(_cut_then, group, list(sending)), "ringdp-c10d")


def _cut_then(group: wire.Group, sending: list[threading.Thread]) -> None:
    """Once that has been sent."""
    for thread in sending:
        thread.join()
    cut(group)


def cut(group: wire.Group) -> None:
    """End all waits of this rank's, and its connections: gloo does where one wait has timed out."""
    if group.size() > 1:
        with suppress(RuntimeError):
            neighbour = (group.rank() + 1) % group.size()
            group.recv([torch.empty(1)], neighbour, CUT).wait(SHORTEST)


def hold(parts: list[wire.Pending]) -> None:
    """Until they have been sent; if that fails, it is the receiver's loss."""
    with suppress(RuntimeError):
        for part in parts:
            part.wait(wire.LONG)
