"""The communicators of a job that share no memory, seen from outside it: through the job's store.

A rank's environment, as torchrun has set it, says where that is. The ranks are asked what they do,
and answer (see `transport.answers`); nothing else of the job is touched, and nothing they say is
trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistError

from ringdp.comm.rendezvous import NAMES, store_of
from ringdp.errors import CommunicationError
from ringdp.transport.answers import Survey, survey_from_outside
from ringdp.transport.base import Failure
from ringdp.transport.told import told_in

TIMEOUT = timedelta(seconds=5)  # for a store that is gone
MOST = 1 << 16  # ranks, or communicators


class Asked(NamedTuple):
    """One communicator; `failed`: what ended it."""

    name: str
    survey: Survey
    failed: Failure | None


def asked(environ: Mapping[str, str]) -> list[Asked]:
    """Those that are not closed, of the job of a process with that environment.

    None are found where it is not torchrun's. Raises CommunicationError where the store cannot be
    reached, UsageError for variables that torchrun does not set so.
    """
    store, found = store_of(environ, TIMEOUT), []
    if store is None:
        return []
    try:
        for key in (f"{NAMES}/{k + 1}" for k in range(min(store.add(NAMES, 0), MOST))):
            line = store.get(key).decode(errors="replace") if store.check([key]) else ""
            name, _, size = line.rpartition(" ")
            if not (size.isdecimal() and len(size) < 6 and 0 < int(size) <= MOST):
                continue
            ranks, own = int(size), PrefixStore(name, store)
            if not own.check([f"closed/{rank}" for rank in range(ranks)]):
                found.append(Asked(name, survey_from_outside(own, ranks), told_in(own, ranks)))
    except DistError as e:
        raise CommunicationError(f"the job's store went away: {e}") from e
    return found
