"""Makes and finds communicators: of the job's ranks, or of those of a torch group.

The ranks meet in a store. They exchange only text and numbers there, and check what they read;
nothing is unpickled. Whoever can reach the store can disturb the start of the ranks, but not access
their memory: it is opened through /proc, which only the same user can do.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError, ProcessGroup, group, is_initialized

from ringdp.comm.arguments import check_link, check_timeout, check_warn_after
from ringdp.comm.communicator import Communicator
from ringdp.comm.guard import log_unraised
from ringdp.comm.store import generation, host, job_store, meeting
from ringdp.errors import CollectiveTimeout, CommunicationError, PeerLost, UsageError
from ringdp.transport.base import Link, Transport
from ringdp.transport.c10d.transport import C10dTransport
from ringdp.transport.c10d.wire import gloo
from ringdp.transport.device.in_flight import Given
from ringdp.transport.nccl.transport import NcclTransport
from ringdp.transport.peer.transport import PeerTransport
from ringdp.transport.shm.transport import ShmTransport
from ringdp.transport.store.client import StoreClient
from ringdp.transport.store.handshake import Handshake, Places

TransportName = Literal["shm", "c10d", "nccl", "nccl-host", "peer", "peer-host"]
TRANSPORTS: tuple[TransportName, ...] = get_args(TransportName)
TIMEOUT, WARN_AFTER = 1800.0, 5.0  # s
NAMES = "communicators"  # key in the job's store: their number; NAMES/1, ... are "name size"
_world: Communicator | None = None  # keeps the last one alive until the next
_worlds: list[weakref.ref[Communicator]] = []
_made: WeakKeyDictionary[ProcessGroup, dict[TransportName, Communicator]] = WeakKeyDictionary()


def init(
    *,
    timeout: float = TIMEOUT,
    warn_after: float = WARN_AFTER,
    transport: TransportName = "shm",
    link: Link | None = None,
) -> Communicator:
    """Return a communicator of all ranks that torchrun started, or of one rank without torchrun.

    Collective: every rank must call it, and equally often. To recover from a failure, ranks that
    have called `abort`, and new processes in place of those that died, call it again.

    `timeout` is how many seconds a collective may wait for another rank. After `warn_after` seconds
    the logger `ringdp` warns once about a collective that has not finished. With a `link` the ranks
    of one host communicate as if over that network: messages are delayed, without using CPU time.
    On CPUs the process keeps the memory that it frees: see `transport.heap`. Raises UsageError if
    torchrun's variables are set only partly, or to values that torchrun does not set.

        transport  shm        shared memory, for the ranks of one host
                   c10d       gloo, for ranks on any hosts. What is split off on one of several
                              hosts uses shared memory
                   nccl       NCCL, for tensors on each rank's current CUDA device. All ranks must
                              call the collectives of all communicators in the same order
                   peer       kernels that write to the memory of peer GPUs of one host; otherwise
                              like nccl
                   nccl-host, peer-host  the same code over host memory, for tests and study
    """
    global _world
    if not (isinstance(transport, str) and transport in TRANSPORTS):
        raise UsageError(f"transport is {transport!r}; allowed: {', '.join(TRANSPORTS)}")
    timeout, warn_after = check_timeout(timeout), check_warn_after(warn_after)
    link = check_link(link)
    if link is not None and transport != "shm":
        raise UsageError("a link is emulated in shared memory only; allowed: transport='shm'")
    store, rank, ranks = job_store(timeout)
    name = f"{generation(store, rank, timeout)}"
    _world = _create(store, rank, ranks, name, transport, link, timeout, warn_after)
    _worlds.append(weakref.ref(_world))
    return _world


def last() -> Communicator | None:
    """Return the last communicator from `init` that is not closed, or None."""
    while _worlds:
        comm = _worlds[-1]()
        if comm and not comm.closed:
            return comm
        _worlds.pop()
    return None


def communicator_of(ranks: object = None, tensors: Iterable[Tensor] = ()) -> Communicator:
    """Return the communicator for `ranks`.

    A Communicator is returned as is. A torch.distributed group gets a communicator over its ranks.
    None is the last communicator from `ringdp.init`, or else that over torch's default group.

    Over a group it uses NCCL if the `tensors` to be moved are on a GPU, and else shared memory. If
    they have no device yet, it uses NCCL if the group only supports GPUs. The first call for a
    group is collective over it. Raises UsageError if `ranks` is something else, or is None and
    there is no communicator.
    """
    if ranks is None:
        if comm := last():
            return comm
        if not is_initialized():
            raise UsageError(
                "no communicator: call ringdp.init() or torch.distributed.init_process_group() "
                "first, or give one"
            )
        ranks = group.WORLD
    if isinstance(ranks, Communicator):
        return ranks
    if not isinstance(ranks, ProcessGroup):
        raise UsageError(
            f"{ranks!r} stands for no ranks; allowed: a ringdp.Communicator, a torch.distributed "
            "group, or None"
        )
    places = {x.device for x in tensors if not x.is_meta}
    gpu = next((place for place in places if place.type == "cuda"), None)
    # Of the backends only NCCL supports no CPU; gloo and ringdp support both.
    only_gpus = {place.type for place in ranks._device_types} == {"cuda"}
    transport: TransportName = "nccl" if gpu or (only_gpus and not places) else "shm"
    communicators = _made.setdefault(ranks, {})
    if transport not in communicators or communicators[transport].ended:
        with torch.cuda.device(gpu) if gpu else nullcontext():
            communicators[transport] = over(ranks, transport=transport)
    return communicators[transport]


def over(group: ProcessGroup, *, transport: TransportName = "shm") -> Communicator:
    """Return a communicator over the ranks of a torch.distributed group, with its timeout.

    Collective over the group. It only uses the group's store and, if the group supports CPUs, its
    barrier, which detects ranks that have died. `transport` is as for `init`.
    """
    rank, ranks = group.rank(), group.size()
    name = f"ringdp/{group.group_name}"
    there, timeout = PrefixStore(name, group.get_group_store()), _timeout(group)
    _await_group(group, there, timeout)
    store, times = meeting(there, rank, ranks, timeout)
    return _create(store, rank, ranks, f"{name}/{times}", transport, timeout=timeout)


def _timeout(group: ProcessGroup) -> float:
    """Return the group's timeout in seconds, or TIMEOUT if its backend does not expose it."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if (given := getattr(options, "_timeout", None)) is not None:
            return float(given.total_seconds())
    return TIMEOUT


def _await_group(group: ProcessGroup, store: Store, timeout: float) -> None:
    """Wait for all ranks of the group, if it supports CPUs.

    If the group's barrier fails, raises PeerLost or CollectiveTimeout, which name missing ranks.
    Raises CommunicationError if the store is gone, or silent for `timeout` seconds.
    """
    rank, ranks = group.rank(), group.size()
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # no backend for CPUs
        return
    here = f"rank {rank} of {ranks} waited to make a communicator over {group.group_name!r}"
    try:
        with StoreClient(lambda: store) as job:
            came = job.ask(lambda s: s.add(f"{ranks}/came/{rank}", 1), timeout)
            try:
                backend.barrier().wait()  # type: ignore[attr-defined]  # torch's stubs
            except CommunicationError:  # our own backend's
                raise
            except RuntimeError as e:
                counts = job.ask(
                    lambda s: [s.add(f"{ranks}/came/{r}", 0) for r in range(ranks)], timeout
                )
                missing = [str(r) for r, count in enumerate(counts) if count < came]
                late = f"of its ranks, {', '.join(missing)} had not come"
                error = CollectiveTimeout if "imed out" in str(e) else PeerLost  # torch: one type
                raise error(
                    f"{here}; "
                    f"{late if missing else 'all its ranks had come, but one was late or has left'}"
                    f": {e}"
                ) from e
    except DistError as e:
        raise CommunicationError(f"{here}; the store is unreachable: {e}") from e


def places_of(comm: Communicator, ranks: Sequence[int]) -> Places:
    """Return where the processes of these ranks of a communicator are recorded."""
    made = comm._connect
    assert isinstance(made, _Connector)
    return Places(PrefixStore(made.whole, made.store), [comm._ranks[r] for r in ranks])


def through(
    store: Store, rank: int, ranks: int, *, name: str, timeout: float, places: Places | None = None
) -> Communicator:
    """Return a communicator over shared memory of the ranks that meet in `store`, which they keep.

    Collective: every rank must call it, and equally often for one store. Raises CommunicationError
    if the ranks are not on one host, or one does not arrive. `places`: where their processes are
    recorded, if they are already, so that the death of one that has not arrived is noticed.
    """
    store, times = meeting(store, rank, ranks, timeout, places=places)
    between = "between hosts torch's backend 'gloo'"
    _one_host(Handshake(store, rank, ranks, timeout, places), between)
    return _create(store, rank, ranks, f"{name}/{times}", timeout=timeout)


def _one_host(handshake: Handshake, instead: str) -> None:
    here, rank, ranks = host(), handshake.rank, handshake.ranks
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


def _create(
    store: Store,
    rank: int,
    ranks: int,
    name: str,
    transport: TransportName = "shm",
    link: Link | None = None,
    timeout: float = TIMEOUT,
    warn_after: float = WARN_AFTER,
) -> Communicator:
    connect = _Connector(store, rank, ranks, name, transport, link)
    return Communicator(connect, range(ranks), name=name, timeout=timeout, warn_after=warn_after)


@dataclass(frozen=True)
class _Connector:
    """The `Connect` of a communicator and of all made from it."""

    store: Store
    rank: int  # of the job
    ranks: int
    whole: str  # the name of the first communicator, which has all ranks of the job
    transport: TransportName
    link: Link | None

    def __call__(
        self, name: str, ranks: Sequence[int], timeout: float, parent: Transport | None
    ) -> Transport:
        first = PrefixStore(self.whole, self.store)
        places = Places(first, ranks, parent.failure) if parent else None
        here, size, store = ranks.index(self.rank), len(ranks), PrefixStore(name, self.store)
        if "peer" in self.transport and places is None:
            between = "between hosts transport 'nccl', or 'c10d'"
            _one_host(Handshake(PrefixStore("host", store), here, size, timeout), between)
        handshake = Handshake(store, here, size, timeout, places)
        with handshake.session():
            if self.transport == "shm" or (places and self._share_a_host(handshake, places)):
                shared = parent.arena if parent and parent.ranks == size else None
                return ShmTransport(handshake, arena=shared, link=self.link)
            if here == 0:
                handshake.run(lambda: self._list(f"{name} {size}"))
            # A wait for a key blocks the store's connection, and gloo waits; so gloo gets its own.
            own: Store = handshake.run(store.clone)  # type: ignore[attr-defined]  # torch's stubs
            group = gloo(handshake, own)
            if self.transport == "c10d":
                return C10dTransport(own, group)
            kind = PeerTransport if "peer" in self.transport else NcclTransport
            given = Given(own, group, handshake, log_unraised)
            return kind(given, host="host" in self.transport)

    def _share_a_host(self, handshake: Handshake, places: Places) -> bool:
        """Whether gloo is to connect these ranks, which are on one host of several: shared memory
        is faster."""
        if self.transport != "c10d" or len(places.ranks) == self.ranks:
            return False
        seen = handshake.sees(places.store, range(self.ranks))
        return seen.issuperset(places.ranks) and len(seen) < self.ranks

    def _list(self, text: str) -> None:
        """List a communicator in the store, for `inspection`."""
        self.store.set(f"{NAMES}/{self.store.add(NAMES, 1)}", text)
