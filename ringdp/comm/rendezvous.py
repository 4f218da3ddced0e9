"""How ranks that meet in a store become a communicator: the job's, a group's, or those given.

What goes through the store is text and numbers, checked where it is read; nothing is unpickled. Who
reaches it can disturb the start of the ranks, but not reach their memory: that is opened through
/proc, by the same user only.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Literal, get_args

import torch
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup

from ringdp.comm.arguments import emulated, patience, till_warning
from ringdp.comm.communicator import Communicator, Connect
from ringdp.comm.guard import differ, unheard
from ringdp.comm.store import generation, host, job_store, meeting
from ringdp.errors import CollectiveTimeout, CommunicationError, PeerLost, UsageError
from ringdp.transport.arena import Arena
from ringdp.transport.base import Link, Transport
from ringdp.transport.c10d.transport import C10dTransport
from ringdp.transport.c10d.wire import gloo
from ringdp.transport.device.in_flight import Given
from ringdp.transport.nccl.transport import NcclTransport
from ringdp.transport.peer.transport import PeerTransport
from ringdp.transport.shm.transport import ShmTransport
from ringdp.transport.store.handshake import Handshake, Places

TransportName = Literal["shm", "c10d", "nccl", "nccl-host", "peer", "peer-host"]
TIMEOUT, WARN_AFTER = 1800.0, 5.0  # s
NAMES = "communicators"  # in a job's store: how many met there; in NAMES/1, ... name and size
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
                   peer       kernels that write to the memory of peers' GPUs, for one host; else
                              as nccl
                   nccl-host, peer-host  the same code over host memory, to test and to study it
    """
    global _world, _worlds
    if not (isinstance(transport, str) and transport in get_args(TransportName)):
        names = ", ".join(get_args(TransportName))
        raise UsageError(f"transport is {transport!r}; allowed: {names}")
    timeout, warn_after, link = patience(timeout), till_warning(warn_after), emulated(link)
    if link is not None and transport != "shm":
        raise UsageError("a link is emulated in shared memory only; allowed: transport='shm'")
    store, rank, ranks = job_store(timeout)
    name = f"{generation(store, rank)}"
    _world = _made(store, rank, ranks, name, transport, link, timeout, warn_after)
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

    Collective over the group, whose timeout it has. `transport` as for `init`.
    """
    rank, ranks = group.rank(), group.size()
    name = f"ringdp/{group.group_name}"
    there = PrefixStore(name, group.get_group_store())
    _all_there(group, there)
    store, times = meeting(there, rank, ranks)
    return _made(store, rank, ranks, f"{name}/{times}", transport, timeout=_timeout(group))


def _timeout(group: ProcessGroup) -> float:
    """What the group was given, where its backend tells."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if (given := getattr(options, "_timeout", None)) is not None:
            return float(given.total_seconds())
    return TIMEOUT


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
    store, times = meeting(store, rank, ranks)
    _one_host(store, rank, ranks, "between hosts torch's backend 'gloo'")
    return _made(store, rank, ranks, f"{name}/{times}", timeout=timeout)


def _one_host(store: Store, rank: int, ranks: int, instead: str) -> None:
    here, handshake = host(), Handshake(store, rank, ranks)
    with handshake.session():
        handshake.publish(f"host/{rank}", here)
        hosts = [handshake.read(f"host/{r}", r).decode(errors="replace") for r in range(ranks)]
    for other, there in enumerate(hosts):
        if there.split()[-1:] != here.split()[-1:]:
            raise CommunicationError(
                f"rank {rank} is on host {here.split()[0]}, rank {other} on "
                f"{' '.join(there.split()[:1])}: here data moves through memory that ranks of one "
                f"host share; allowed: one host, or {instead}"
            )


def _made(
    store: Store,
    rank: int,
    ranks: int,
    name: str,
    transport: TransportName = "shm",
    link: Link | None = None,
    timeout: float = TIMEOUT,
    warn_after: float = WARN_AFTER,
) -> Communicator:
    how = transport, link, timedelta(seconds=timeout)
    connect: Connect = partial(_connect, store, rank, name, *how)
    return Communicator(connect, range(ranks), name=name, timeout=timeout, warn_after=warn_after)


def _connect(
    store: Store,
    rank: int,
    whole: str,
    transport: TransportName,
    link: Link | None,
    timeout: timedelta,
    name: str,
    ranks: Sequence[int],
    parent: Transport | None,
    arena: Arena | None,
) -> Transport:
    """A `Connect`, by its last four arguments. `whole`: the name of the first communicator, which
    has all ranks of the job."""
    places = Places(PrefixStore(whole, store), ranks, parent.failure) if parent else None
    here, size, prefixed = ranks.index(rank), len(ranks), PrefixStore(name, store)
    if transport != "shm" and here == 0:
        store.set(f"{NAMES}/{store.add(NAMES, 1)}", f"{name} {size}")
    if "peer" in transport and places is None:
        between = "between hosts transport 'nccl', or 'c10d'"
        _one_host(PrefixStore("host", prefixed), here, size, between)
    handshake = Handshake(prefixed, here, size, places)
    with handshake.session():
        if transport == "shm":
            return ShmTransport(handshake, arena=arena, link=link)
        # Who waits for a key, as gloo does, keeps others from the connection that it uses.
        own: Store = handshake.run(prefixed.clone)  # type: ignore[attr-defined]  # torch's stubs
        group = gloo(handshake, own, timeout)
        if transport == "c10d":
            return C10dTransport(own, group)
        kind = PeerTransport if "peer" in transport else NcclTransport
        return kind(Given(own, group, handshake, differ, unheard), host="host" in transport)
