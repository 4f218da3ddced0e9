"""How the ranks find each other: torchrun's environment variables and torch's TCPStore."""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta
from itertools import count

from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ringdp.comm.communicator import Communicator
from ringdp.errors import UsageError
from ringdp.transport.base import Link

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TIMEOUT, WARN_AFTER = 1800.0, 5.0  # s
_worlds = count()
_overs: Counter[str] = Counter()  # communicators made over a torch.distributed group, by its name
_world: Communicator | None = None


def init(
    *, timeout: float = TIMEOUT, warn_after: float = WARN_AFTER, link: Link | None = None
) -> Communicator:
    """The communicator of all ranks that torchrun started, or of one rank without it.

    Collective: every rank must call it, and call it equally often. `timeout` is how long a
    collective may wait for another rank, in seconds; after `warn_after` of them the logger `ringdp`
    warns once of a collective that does not end. With a `link` the ranks of one host talk as over
    that network: messages come late, at no cost of cores. Raises UsageError if torchrun's variables
    are set in part only, or are not what torchrun sets.
    """
    global _world
    _world = _connect(timeout, warn_after, link)
    return _world


def world() -> Communicator:
    """The communicator that `init` made last. Raises UsageError if there is none."""
    if _world is None:
        raise UsageError("no communicator: call ringdp.init() first, or pass comm=")
    return _world


def over(group: ProcessGroup) -> Communicator:
    """A communicator of the ranks of a torch.distributed group, of which only the store is used.

    Collective over the group.
    """
    _overs[group.group_name] += 1
    name = f"ringdp/{group.group_name}/{_overs[group.group_name]}"
    store = PrefixStore(name, group.get_group_store())
    rank, ranks = group.rank(), group.size()
    return Communicator(store, rank, ranks, name=name, timeout=TIMEOUT, warn_after=WARN_AFTER)


def _connect(timeout: float, warn_after: float, link: Link | None) -> Communicator:
    found = [v for v in VARIABLES if v in os.environ]
    name = f"ringdp/{next(_worlds)}"
    if not {"RANK", "WORLD_SIZE"} & set(found):
        return Communicator(
            None, 0, 1, name=name, timeout=timeout, warn_after=warn_after, link=link
        )
    if missing := [v for v in VARIABLES if v not in found]:
        raise UsageError(
            f"{', '.join(found)} set, but not {', '.join(missing)}: start the ranks with torchrun, "
            "which sets all of them"
        )
    store, rank, ranks = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))
    return Communicator(
        PrefixStore("ringdp", store),
        *(rank, ranks),
        name=name,
        timeout=timeout,
        warn_after=warn_after,
        link=link,
    )
