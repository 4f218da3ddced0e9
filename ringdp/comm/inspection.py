"""Inspects a job's communicators that share no memory, from outside the job, through its store.

The store's address is in the ranks' environment, which torchrun sets. The ranks are asked what they
are doing and answer (see `transport.store.status`). Nothing else in the job is touched, and answers
are not trusted.
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
    """One communicator. `failed` is the failure that ended it, if any."""

    name: str
    survey: Survey
    failed: Failure | None


def inspect_job(environ: Mapping[str, str]) -> list[Inspected]:
    """Return the open communicators of the job that a process with this environment belongs to.

    There are none if torchrun did not start it. Raises CommunicationError if the store cannot be
    reached, and UsageError if torchrun's variables are not such as torchrun sets.
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
    """Return "name size" of each communicator that was made."""
    return [text_of(store, f"{NAMES}/{k + 1}") for k in range(min(store.add(NAMES, 0), MOST))]


def _seen(store: Store, line: str) -> Inspected | None:
    """Inspect one communicator; return None if it is closed or its line is invalid."""
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
