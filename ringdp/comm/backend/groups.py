"""A torch.distributed group over a Communicator: how torch makes one, what it asks it, its end."""

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
from torch.distributed import ProcessGroup

from ringdp.comm.backend.buckets import Buckets
from ringdp.comm.backend.messages import Messages
from ringdp.comm.backend.moves import Moves
from ringdp.comm.backend.reductions import Reductions
from ringdp.comm.backend.works import GroupWork, Watcher, all_of
from ringdp.comm.communicator import Communicator
from ringdp.comm.rendezvous import through
from ringdp.errors import CommunicationError

NAME = "ringdp"
DEVICES = ("cpu", "cuda")
log = logging.getLogger("ringdp")


@dataclass
class GroupOptions:
    """What torch.distributed.split_group copies from a group to those made of it."""

    _timeout: timedelta
    backend: str = NAME


def create(given: Any, _: object) -> Group:
    """For `Backend.register_backend`. given: torch's _DistributedBackendOptions."""
    rank, ranks = given.group_rank, given.group_size
    limit = given.timeout.total_seconds()
    comm = through(given.store, rank, ranks, name=f"backend/{given.group_id}", timeout=limit)
    return Group(comm, given.store)


class Group(Reductions, Moves, Messages, ProcessGroup):  # type: ignore[misc]
    """What `torch.distributed.init_process_group("ringdp")` and `new_group` make.

    Tensors must not be touched until a work's `wait` has returned; without async_op the result is
    there when the call returns. Errors are the communicator's: PeerLost, CollectiveTimeout and
    CollectiveMismatch, all of them RuntimeErrors, raised by `wait`.
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
        self._splits = 0

    # --- its calls

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device | None = None) -> GroupWork:
        """All works since `_start_coalescing`, as one."""
        works, self._coalesced = self._coalesced or [], None
        return all_of(works, self._watcher)

    # --- its end

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> Group | None:
        """The group of those ranks of this one. Collective over all of it.

        Every rank passes its own new group's ranks, or anybody's if it is in none, and gets None.
        """
        mine = self._comm.rank in new_ranks
        made = self._comm.split(
            min(new_ranks) if mine else None, new_ranks.index(self._comm.rank) if mine else 0
        )
        self._splits += 1
        if made is None:
            return None
        name = group_name or f"{self._name}:split:{self._splits}:{min(new_ranks)}"
        group = Group(made, PrefixStore(f"{name}/", self._store))
        group.setGroupName(name)
        group.setGroupDesc(group_desc or f"{self._desc}:split:{self._splits}")
        if timeout is not None:
            group.set_timeout(timeout)
        return group

    splitGroup = split_group  # noqa: N815

    def comm_split_count(self) -> int:
        return self._splits

    def shutdown(self) -> None:
        """Close. How a collective failed elsewhere is logged: torch has more groups to close."""
        try:
            self._comm.close()
        except CommunicationError as error:
            log.warning("group %s was closed after a failure: %s", self._name, error)
        self._watcher.stop()

    def abort(self) -> None:
        """Give up: every other rank's calls raise PeerLost at once."""
        self._comm.abort()
        self._watcher.stop()

    # --- what torch asks it

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a call may wait for another rank, from now on."""
        self._comm.set_timeout(timeout.total_seconds())

    _set_default_timeout = set_timeout

    @property
    def options(self) -> GroupOptions:
        return GroupOptions(timedelta(seconds=self._comm.timeout))

    def get_group_store(self) -> Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return list(map(torch.device, DEVICES))

    def get_backend(self, device: torch.device) -> Group:
        return self

    _get_backend = get_backend  # type: ignore[assignment]

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """In memory that all ranks reach without a copy."""
        return self._comm.empty(size, dtype=dtype)

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Nothing: a group is connected when it is made."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Nothing: new_group meets through the store, without the ranks that are not in it."""

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
        """Nothing: it is 0 on every rank."""

    def _get_sequence_number_for_group(self) -> int:
        return self._comm.issued
