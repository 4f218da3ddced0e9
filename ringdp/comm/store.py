"""The job's store: finds it from torchrun's variables, serves it if needed, and lets ranks meet.

A store that ringdp starts listens on the address in MASTER_ADDR, for example the loopback. The one
that torchrun starts listens on every interface of the host.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache, partial
from time import monotonic, sleep
from typing import NamedTuple

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import DistError

from ringdp.errors import CommunicationError, PeerLost, UsageError
from ringdp.transport.store.client import PATIENCE, StoreClient
from ringdp.transport.store.handshake import Places
from ringdp.transport.store.processes import boot_id, has_ended, pid_of

LOOK_EVERY = 0.005  # s between checks whether rank 0 has arrived
NUMBERS = ("RANK", "WORLD_SIZE", "MASTER_PORT")
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_stores: dict[tuple[_Place, str], Store] = {}
_alone: Store = HashStore()  # for a process without torchrun


def host() -> str:
    """Return this host's name and its boot id, which is unique."""
    return f"{socket.gethostname()} {boot_id()}"


def job_store(timeout: float) -> tuple[Store, int, int]:
    """Return the job's store, with `timeout` in seconds, this rank, and the number of ranks.

    The process keeps the store until it ends, since rank 0 may serve it to the others. torchrun's
    agent keeps one store over all restarts, so each restart has its own prefix. A process without
    torchrun is a job of one rank.
    """
    place, limit = _place(os.environ), timedelta(seconds=timeout)
    if place is None:
        return _alone, 0, 1
    key = place, _prefix(os.environ)
    if key not in _stores:
        agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        server = _server(place, limit, serves=place.rank == 0 and not agent_serves)
        _stores[key] = PrefixStore(_prefix(os.environ), server)
    _stores[key].set_timeout(limit)
    return _stores[key], place.rank, place.ranks


class _Place(NamedTuple):
    """This process's place in the job, from torchrun's variables."""

    rank: int
    ranks: int
    host: str
    port: int


def _place(environ: Mapping[str, str]) -> _Place | None:
    """Read torchrun's variables; return None if there are none. Raises UsageError if they are not
    such as torchrun sets."""
    found = {v: environ[v] for v in VARIABLES if v in environ}
    if not {"RANK", "WORLD_SIZE"} & found.keys():
        return None
    if missing := [v for v in VARIABLES if v not in found]:
        raise UsageError(
            f"{', '.join(found)} set, but not {', '.join(missing)}: start the ranks with torchrun, "
            "which sets all of them"
        )
    for name in NUMBERS:
        if not found[name].isdecimal():
            raise UsageError(f"{name} is {found[name]!r}; allowed: a whole number, 0 or more")
    rank, ranks, port = (int(found[name]) for name in NUMBERS)
    place = _Place(rank, ranks, found["MASTER_ADDR"], port)
    if place.rank >= place.ranks:
        raise UsageError(f"RANK is {place.rank}; WORLD_SIZE is {place.ranks}: ranks are below it")
    if place.port > 65535:
        raise UsageError(f"MASTER_PORT is {place.port}; allowed: 0..65535")
    return place


def store_of(environ: Mapping[str, str], timeout: timedelta) -> Store | None:
    """Return the store of the job that a process with this environment belongs to, or None."""
    if (place := _place(environ)) is None:
        return None
    return PrefixStore(_prefix(environ), _server(place, timeout, serves=False, waits=False))


def _prefix(environ: Mapping[str, str]) -> str:
    run, restart = (environ.get(f"TORCHELASTIC_{v}") for v in ("RUN_ID", "RESTART_COUNT"))
    return f"ringdp/{run or ''}/{restart or '0'}"


def _server(place: _Place, timeout: timedelta, *, serves: bool, waits: bool = True) -> Store:
    try:
        if serves:
            return _serve(place, timeout)
        if not waits:  # torch would retry a store that is gone for up to twice the timeout
            socket.create_connection((place.host, place.port), timeout.total_seconds()).close()
        client = partial(TCPStore, place.host, place.port, is_master=False, timeout=timeout)
        with StoreClient(client) as reached:
            return reached.ask(lambda store: store, timeout.total_seconds() + PATIENCE)
    except (DistError, OSError) as e:
        raise CommunicationError(
            f"rank {place.rank} cannot reach rank 0's store at {place.host}:{place.port}: {e}"
        ) from e


def _serve(place: _Place, timeout: timedelta) -> TCPStore:
    """Serve the store on one interface, the ranks' own; torch's would listen on all of them."""
    serve = partial(
        TCPStore,
        place.host,
        place.port,
        is_master=True,
        timeout=timeout,
        multi_tenant=True,
        wait_for_workers=False,
    )
    try:
        listening = socket.create_server((place.host, place.port))
    except OSError:  # another library in this process already serves there, and torch shares it
        return serve()
    return serve(master_listen_fd=listening.detach())


def meeting(
    store: Store,
    rank: int,
    ranks: int,
    timeout: float,
    to: str = "make a communicator",
    places: Places | None = None,
) -> tuple[Store, int]:
    """Return a part of `store` for this meeting of all ranks, and the meeting's number.

    `places`: where the ranks' processes are recorded, if they are already. Then PeerLost, which
    says what this rank waited `to` do, is raised if rank 0 ends before it arrives.
    """
    pid = cache(pid_of)

    def look() -> None:
        if places and has_ended(pid(places.store, places.ranks[0])):
            raise PeerLost(f"rank {rank} of {ranks} waited to {to}; rank 0 has ended")

    store = PrefixStore(f"{ranks}", store)
    times = generation(store, rank, timeout, look)
    return PrefixStore(f"{times}", store), times


def generation(store: Store, rank: int, timeout: float, look: Callable[[], object] = bool) -> int:
    """Return the number of this meeting of all ranks, the same on all.

    `look`, which may raise, is called repeatedly while rank 0 has not arrived, up to `timeout` s.

    Rank 0 opens a meeting; every other rank joins the first one that it has not joined yet. So
    ranks find one another again after a failure, whether they are the same processes or new ones.
    """
    limit = timeout + PATIENCE
    try:
        with StoreClient(lambda: store) as job:
            if rank == 0:
                return job.ask(_open, limit)
            taken = job.ask(lambda s: s.add(f"seats/{rank}", 0), limit)
            until = monotonic() + limit
            while not job.ask(lambda s: s.check([f"open/{taken + 1}"]), limit):
                if monotonic() > until:
                    raise DistError(f"rank 0 has not come in {limit:.0f} s")
                job.ask(lambda _: look(), limit)
                sleep(LOOK_EVERY)
            return job.ask(lambda s: s.add(f"seats/{rank}", 1), limit)
    except DistError as e:
        raise CommunicationError(f"rank {rank} did not meet the others: {e}") from e


def _open(store: Store) -> int:
    """Open the next meeting: in one request, as the others would wait for a number taken alone."""
    opened = store.add("generations", 1)
    store.set(f"open/{opened}", "")
    return opened
