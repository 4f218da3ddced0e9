"""The communicators of a job that share no memory, seen from outside it: through the job's store.

A rank's environment, as torchrun has set it, says where that is. The ranks are asked what they do,
and answer (see `transport.store.status`); nothing else of the job is touched, and nothing they say
is trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError

from ringdp.comm.rendezvous import NAMES
from ringdp.comm.store import store_of
from ringdp.errors import CommunicationError
from ringdp.transport.base import Failure
from ringdp.transport.store.client import StoreClient, StoreSilent
from ringdp.transport.store.failures import failure_in
from ringdp.transport.store.processes import text_of
from ringdp.transport.store.status import Survey, survey_from_outside

TIMEOUT = timedelta(seconds=5)  # for a store that is gone
MOST = 1 << 16  # ranks, or communicators


class Inspected(NamedTuple):
    """One communicator; `failed`: what ended it."""

    name: str
    survey: Survey
    failed: Failure | None


def inspect_job(environ: Mapping[str, str]) -> list[Inspected]:
    """Those that are not closed, of the job of a process with that environment.

    None are found where it is not torchrun's. Raises CommunicationError where the store cannot be
    reached, UsageError for variables that torchrun does not set so.
    """
    store = store_of(environ, TIMEOUT)
    if store is None:
        return []
    try:
        with StoreClient(lambda: store) as job:
            return list(filter(None, [_seen(store, line) for line in job.ask(_lines)]))
    except StoreSilent as e:
        raise CommunicationError(str(e)) from e
    except DistError as e:
        raise CommunicationError(f"the job's store went away: {e}") from e


def _lines(store: Store) -> list[str]:
    """What is said of each communicator that was made: its name and size."""
    return [text_of(store, f"{NAMES}/{k + 1}") for k in range(min(store.add(NAMES, 0), MOST))]


def _seen(store: Store, line: str) -> Inspected | None:
    """None for one that is closed, or makes no sense."""
    name, _, size = line.rpartition(" ")
    if not (size.isdecimal() and len(size) < 6 and 0 < int(size) <= MOST):
        return None
    ranks = int(size)
    with StoreClient(lambda: PrefixStore(name, store)) as own:
        if own.ask(lambda s: s.check([f"closed/{rank}" for rank in range(ranks)])):
            return None
        return Inspected(
            name, survey_from_outside(own, ranks), own.ask(partial(failure_in, ranks=ranks))
        )
