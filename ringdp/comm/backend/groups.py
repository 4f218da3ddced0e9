"""The ProcessGroup over a Communicator: how torch creates, queries, splits and closes it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup, group

from ringdp.comm.backend.buckets import Buckets
from ringdp.comm.backend.moves import Moves
from ringdp.comm.backend.reductions import Reductions
from ringdp.comm.backend.works import GroupWork, Watcher, all_of
from ringdp.comm.communicator import Communicator
from ringdp.comm.rendezvous import places_of, through
from ringdp.errors import CommunicationError, UsageError

NAME = "ringdp"
log = logging.getLogger("ringdp")


@dataclass
class GroupOptions:
    """The options that torch.distributed.split_group copies from a group to those split from it."""

    _timeout: timedelta
    backend: str = NAME


def create(given: Any, _: object) -> Group:
    """Create a group; see `Backend.register_backend`. given: torch's _DistributedBackendOptions."""
    rank, ranks = given.group_rank, given.group_size
    if not 0 <= rank < ranks:
        raise UsageError(f"rank is {rank}; world_size is {ranks}: ranks are 0..{ranks - 1}")
    limit = given.timeout.total_seconds()
    world, places = group.WORLD, None
    if isinstance(world, Group):  # else this is the first group, or torch's default one is gloo's
        places = places_of(world._comm, given.global_ranks_in_group)
    name = f"backend/{given.group_id}"
    comm = through(given.store, rank, ranks, name=name, timeout=limit, places=places)
    return Group(comm, given.store)


class Group(Reductions, Moves, ProcessGroup):  # type: ignore[misc]
    """The group that `torch.distributed.init_process_group("ringdp")` and `new_group` create.

    Do not touch tensors until a work's `wait` has returned; without async_op the result is there
    when the call returns. `wait` raises the communicator's errors: PeerLost, CollectiveTimeout and
    CollectiveMismatch, which are all RuntimeErrors.
    """

    supports_splitting = True
    supports_coalescing = True
    supports_time_estimate = _supports_time_estimate = False
    supports_reconfigure = supports_window = False

    def __init__(self, comm: Communicator, store: Store) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]
        self._comm, self._store, self._buckets = comm, store, Buckets(comm)
        self._watcher, self._ones = Watcher(), deque(maxlen=16)
        self._issuing = threading.Lock()
        self._coalesced: list[GroupWork] | None = None
        self._name = self._desc = ""

    # --- coalescing

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device | None = None) -> GroupWork:
        """Return all works since `_start_coalescing` as one."""
        works, self._coalesced = self._coalesced or [], None
        return all_of(works, self._watcher)

    # --- split and close

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> Group | None:
        """Return a group of `new_ranks`, which are ranks of this group. Collective over this group.

        Every rank passes the ranks of its own new group. A rank that is in none passes those of any
        other, and gets None.
        """
        member = self._comm.rank in new_ranks
        comm = self._comm.split(
            min(new_ranks) if member else None, new_ranks.index(self._comm.rank) if member else 0
        )
        if comm is None:
            return None
        name = group_name or comm._name
        group = Group(comm, PrefixStore(f"{name}/", self._store))
        group.setGroupName(name)
        group.setGroupDesc(group_desc or f"{self._desc}:split")
        if timeout is not None:
            group.set_timeout(timeout)
        return group

    splitGroup = split_group  # noqa: N815

    def shutdown(self) -> None:
        """Close the group. Failures on other ranks are logged: torch has more groups to close."""
        try:
            self._comm.close()
        except CommunicationError as error:
            log.warning("group %s was closed after a failure: %s", self._name, error)
        self._watcher.stop()

    def abort(self) -> None:
        """Abort: calls of all other ranks raise PeerLost at once."""
        self._comm.abort()
        self._watcher.stop()

    # --- queries by torch

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long later calls may wait for another rank."""
        self._comm.set_timeout(timeout.total_seconds())

    _set_default_timeout = set_timeout

    @property
    def options(self) -> GroupOptions:
        return GroupOptions(timedelta(seconds=self._comm.timeout))

    def get_group_store(self) -> Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")]

    def get_backend(self, device: torch.device) -> Group:
        return self

    _get_backend = get_backend  # type: ignore[assignment]

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor in memory that all ranks have mapped, which saves a copy."""
        return self._comm.empty(size, dtype=dtype)

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Does nothing: a group is connected when it is created."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Does nothing: new_group meets through the store, without ranks that are not in it."""

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = desc

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: it starts at 0 on every rank."""

    def _get_sequence_number_for_group(self) -> int:
        return self._comm.issued
