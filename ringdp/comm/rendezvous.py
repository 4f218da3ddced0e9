"""How the ranks find each other: torchrun's environment variables and torch's TCPStore.

What goes through the store is text and numbers, checked where it is read; nothing is unpickled. A
store that ringdp starts listens where MASTER_ADDR says, the loopback for instance; the one that
torchrun starts listens on every interface of the host. Who reaches it can disturb the start of the
ranks, but not reach their memory: that is opened through /proc, by the same user only.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import DistError, ProcessGroup

from ringdp.comm.asked import emulated, patience, till_warning
from ringdp.comm.communicator import Communicator, Connect
from ringdp.comm.guard import differ
from ringdp.errors import CollectiveTimeout, CommunicationError, PeerLost, UsageError
from ringdp.transport.arena import Arena
from ringdp.transport.asking import PATIENCE, Asking
from ringdp.transport.base import Link, Transport
from ringdp.transport.c10d import C10dTransport
from ringdp.transport.making import Making
from ringdp.transport.nccl.transport import NcclTransport
from ringdp.transport.shm import ShmTransport
from ringdp.transport.wire import gloo

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TransportName = Literal["shm", "c10d", "nccl", "nccl-host"]
TIMEOUT, WARN_AFTER = 1800.0, 5.0  # s
NAMES = "communicators"  # in a job's store: how many met there; in NAMES/1, ... name and size
_stores: dict[tuple[_Place, str, str], Store] = {}
_alone: Store = HashStore()  # of a process without torchrun
_world: Communicator | None = None  # the last one lives until the next
_worlds: list[weakref.ref[Communicator]] = []


def init(
    *,
    timeout: float = TIMEOUT,
    warn_after: float = WARN_AFTER,
    transport: TransportName = "shm",
    link: Link | None = None,
) -> Communicator:
    """The communicator of all ranks that torchrun started, or of one rank without it.

    Collective: every rank must call it, and call it equally often. After a failure, ranks that have
    called `abort`, and new processes in the place of those that died, come together by it again.
    `timeout` is how long a collective may wait for another rank, in seconds; after `warn_after` of
    them the logger `ringdp` warns once of a collective that does not end. With a `link` the ranks
    of one host talk as over that network: messages come late, at no cost of cores. On CPUs the
    process keeps the memory that it frees: see `transport.heap`. Raises UsageError if torchrun's
    variables are set in part only, or are not what torchrun sets.

        transport  shm        shared memory, for the ranks of one host
                   c10d       gloo, for any
                   nccl       NCCL, for tensors on each rank's current CUDA device, where all ranks
                              must call the collectives of all communicators in one order
                   nccl-host  that transport's code over host memory, to test and to study it
    """
    global _world, _worlds
    if not (isinstance(transport, str) and transport in get_args(TransportName)):
        names = ", ".join(get_args(TransportName))
        raise UsageError(f"transport is {transport!r}; allowed: {names}")
    timeout, warn_after, link = patience(timeout), till_warning(warn_after), emulated(link)
    if link is not None and transport != "shm":
        raise UsageError("a link is emulated in shared memory only; allowed: transport='shm'")
    _world = _connect(timeout, warn_after, transport, link)
    _worlds = [*filter(_open, _worlds), weakref.ref(_world)]
    return _world


def last() -> Communicator | None:
    """What `init` made last, of those that are not closed."""
    return next(filter(None, map(_open, reversed(_worlds))), None)


def _open(made: weakref.ref[Communicator]) -> Communicator | None:
    comm = made()
    return comm if comm and not comm.closed else None


def over(group: ProcessGroup, *, transport: TransportName = "shm") -> Communicator:
    """A communicator of the ranks of a torch.distributed group, of which only the store is used,
    and a barrier where it has one for CPUs: that hears of who has died.

    Collective over the group. `transport` as for `init`.
    """
    rank, ranks = group.rank(), group.size()
    name = f"ringdp/{group.group_name}"
    there = PrefixStore(name, group.get_group_store())
    _all_there(group, there)
    store, times = _meeting(there, rank, ranks)
    name = f"{name}/{times}"
    if transport == "shm":
        connect: Connect = partial(_shm, store, rank, None)
    else:
        connect = partial(_gloo, store, rank, timedelta(seconds=TIMEOUT), transport)
    return Communicator(connect, range(ranks), name=name, timeout=TIMEOUT, warn_after=WARN_AFTER)


def _all_there(group: ProcessGroup, store: Store) -> None:
    """Names who has not come, if the group hears of it, by PeerLost or CollectiveTimeout."""
    rank, ranks = group.rank(), group.size()
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # it has none
        return
    came = store.add(f"{ranks}/came/{rank}", 1)
    try:
        backend.barrier().wait()  # type: ignore[attr-defined]  # torch's stubs
    except CommunicationError:  # our own backend's
        raise
    except RuntimeError as e:
        missing = [r for r in range(ranks) if store.add(f"{ranks}/came/{r}", 0) < came]
        error = CollectiveTimeout if "imed out" in str(e) else PeerLost  # torch has one type
        raise error(
            f"rank {rank} of {ranks} waited to make a communicator over {group.group_name!r}; of "
            f"its ranks, {', '.join(map(str, missing)) or 'none'} had not come: {e}"
        ) from e


def through(store: Store, rank: int, ranks: int, *, name: str, timeout: float) -> Communicator:
    """A communicator over shared memory of the ranks that meet in a store, which they keep.

    Collective: every rank must call it, and call it equally often for one store. Raises
    CommunicationError where they are not on one host, or one does not come.
    """
    store, times = _meeting(store, rank, ranks)
    _one_host(store, rank, ranks)
    connect, name = partial(_shm, store, rank, None), f"{name}/{times}"
    return Communicator(connect, range(ranks), name=name, timeout=timeout, warn_after=WARN_AFTER)


def host() -> str:
    """The name of this host, and what no other has."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot}"


def job_store(name: str) -> tuple[Store | None, int, int]:
    """A part of the job's store that no other has, this rank, and how many there are.

    Collective: every rank must call it, and call it equally often for one name. None for a rank
    alone.
    """
    place = _place()
    if place is None or place.ranks == 1:
        return None, 0, 1
    store = PrefixStore(name, _store(place, timedelta(seconds=TIMEOUT)))
    return _meeting(store, place.rank, place.ranks)[0], place.rank, place.ranks


def _one_host(store: Store, rank: int, ranks: int) -> None:
    here, making = host(), Making(store, rank, ranks)
    with making.telling():
        making.say(f"host/{rank}", here)
        hosts = [making.heard(f"host/{r}", r).decode(errors="replace") for r in range(ranks)]
    for other, there in enumerate(hosts):
        if there.split()[-1:] != here.split()[-1:]:
            raise CommunicationError(
                f"rank {rank} is on host {here.split()[0]}, rank {other} on "
                f"{' '.join(there.split()[:1])}: ringdp moves data through memory that ranks of "
                "one host share; allowed: one host, or between hosts torch's backend 'gloo'"
            )


def _connect(
    timeout: float, warn_after: float, transport: TransportName, link: Link | None
) -> Communicator:
    place, limit = _place(), timedelta(seconds=timeout)
    store, rank, ranks = _alone, 0, 1
    if place is not None:
        store, rank, ranks = _store(place, limit), place.rank, place.ranks
    name = f"{_generation(store, rank)}"
    if transport == "shm":
        connect: Connect = partial(_shm, store, rank, link)
    else:
        connect = partial(_gloo, store, rank, limit, transport)
    return Communicator(
        connect,
        range(ranks),
        name=name,
        timeout=timeout,
        warn_after=warn_after,
    )


def _shm(
    store: Store,
    rank: int,
    link: Link | None,
    name: str,
    ranks: Sequence[int],
    arena: Arena | None,
) -> Transport:
    """A `Connect`, by its first three arguments."""
    prefixed = PrefixStore(name, store)
    return ShmTransport(prefixed, ranks.index(rank), len(ranks), arena=arena, link=link)


def _gloo(
    store: Store,
    rank: int,
    timeout: timedelta,
    transport: TransportName,
    name: str,
    ranks: Sequence[int],
    _: Arena | None,
) -> Transport:
    """The same over gloo, and over NCCL beside it."""
    prefixed = PrefixStore(name, store)
    if rank == ranks[0]:
        store.set(f"{NAMES}/{store.add(NAMES, 1)}", f"{name} {len(ranks)}")
    here, size = ranks.index(rank), len(ranks)
    making = Making(prefixed, here, size)
    with making.telling():
        group = gloo(making, prefixed, here, size, timeout)
        if transport == "c10d":
            return C10dTransport(prefixed, group)
        host = transport == "nccl-host"
        return NcclTransport(prefixed, group, making, host=host, differ=differ)


class _Place(NamedTuple):
    """This process's place in the job, as torchrun's variables say it."""

    rank: int
    ranks: int
    host: str
    port: int


def _place(environ: Mapping[str, str] = os.environ) -> _Place | None:
    """None without torchrun."""
    found = {v: environ[v] for v in VARIABLES if v in environ}
    if not {"RANK", "WORLD_SIZE"} & found.keys():
        return None
    if missing := [v for v in VARIABLES if v not in found]:
        raise UsageError(
            f"{', '.join(found)} set, but not {', '.join(missing)}: start the ranks with torchrun, "
            "which sets all of them"
        )
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not found[name].isdecimal():
            raise UsageError(f"{name} is {found[name]!r}; allowed: a whole number, 0 or more")
    place = _Place(
        int(found["RANK"]),
        int(found["WORLD_SIZE"]),
        found["MASTER_ADDR"],
        int(found["MASTER_PORT"]),
    )
    if place.rank >= place.ranks:
        raise UsageError(f"RANK is {place.rank}; WORLD_SIZE is {place.ranks}: ranks are below it")
    if place.port > 65535:
        raise UsageError(f"MASTER_PORT is {place.port}; allowed: 0..65535")
    return place


def _store(place: _Place, timeout: timedelta) -> Store:
    """The job's store, which this process keeps for good: rank 0's may serve the others.

    torchrun's agent serves all starts of the ranks from one store, so each has names of its own.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = (place, os.environ.get("TORCHELASTIC_RUN_ID", ""), restart)
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if key not in _stores:
        serves = place.rank == 0 and not agent_serves
        server = _server(place, timeout, serves=serves)
        _stores[key] = PrefixStore(_prefix(os.environ), server)
    _stores[key].set_timeout(timeout)
    return _stores[key]


def store_of(environ: Mapping[str, str], timeout: timedelta) -> Store | None:
    """That of the job of a process with this environment, None if it is of none."""
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
        if not waits:  # torch asks one that is gone again, for up to twice the timeout
            socket.create_connection((place.host, place.port), timeout.total_seconds()).close()
        client = partial(TCPStore, place.host, place.port, is_master=False, timeout=timeout)
        with Asking(client) as reached:
            return reached.ask(lambda store: store, timeout.total_seconds() + PATIENCE)
    except (DistError, OSError) as e:
        raise CommunicationError(
            f"rank {place.rank} cannot reach rank 0's store at {place.host}:{place.port}: {e}"
        ) from e


def _serve(place: _Place, timeout: timedelta) -> TCPStore:
    """torch's own store listens on every interface; where the ranks meet on one, so does this."""
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
    except OSError:  # another library of this process serves there already, and shares it
        return serve()
    return serve(master_listen_fd=listening.detach())


def _meeting(store: Store, rank: int, ranks: int) -> tuple[Store, int]:
    """The part of a store for this coming together of so many ranks, and the how-many-th it is."""
    store = PrefixStore(f"{ranks}", store)
    times = _generation(store, rank)
    return PrefixStore(f"{times}", store), times


def _generation(store: Store, rank: int) -> int:
    """The how-many-th coming together of all ranks this is; a number for all of them.

    Rank 0 opens one; each other rank takes its seat in the first where that is free. So ranks that
    come again after a failure find one another, whether they are the same processes or new ones.
    """
    limit: float = store.timeout.total_seconds() + PATIENCE  # type: ignore[attr-defined]  # stubs
    try:
        if rank == 0:
            opened = store.add("generations", 1)
            store.set(f"open/{opened}", "")
            return opened
        with Asking(lambda: store) as job:
            taken = job.ask(lambda s: s.add(f"seats/{rank}", 0), limit)
            job.ask(lambda s: s.wait([f"open/{taken + 1}"]), limit)
            return job.ask(lambda s: s.add(f"seats/{rank}", 1), limit)
    except DistError as e:
        raise CommunicationError(f"rank {rank} did not meet rank 0: {e}") from e
