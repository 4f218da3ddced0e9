"""DDP's join: what the module does while ranks have inputs of unequal length. See `uneven`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

from ringdp.comm import Communicator
from ringdp.errors import UsageError
from ringdp.parallel import replicas
from ringdp.parallel.ddp.reducer import Reducer
from ringdp.parallel.ddp.uneven import Shadow, Status, Uneven

ALONE = _JoinConfig(False, False, False)  # outside any join


class Joining(Joinable):
    """The part of DistributedDataParallel that joins."""

    process_group: Any
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    _uneven: Uneven | None
    _authoritative_rank: int | None
    _reducer: Callable[[], tuple[Communicator, Reducer]]
    _broadcast: Callable[..., None]
    _named_buffers: Callable[[], dict[str, Tensor]]

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Within it ranks may have inputs of unequal length: see `uneven`. Collective.

        With `throw_on_early_termination` every rank raises ModelError once one has ended.
        """
        if not enable:
            yield
            return
        comm, reducer = self._reducer()
        uneven = self._uneven = Uneven(
            comm, initial_size=divide_by_initial_world_size, throw=throw_on_early_termination
        )
        self._join_config = _JoinConfig(True, throw_on_early_termination, False)
        try:
            yield
            uneven.shadow(self._shadow)
            self._agree()
        finally:
            self._uneven, reducer.divisor = None, comm.size
            self._join_config = ALONE

    def join_hook(self, *, divide_by_initial_world_size: bool = True, **_: Any) -> JoinHook:
        """For torch's Join, over a torch.distributed group. `_`: what its other joinables take."""
        comm = self._reducer()[0]
        self._uneven = Uneven(comm, initial_size=divide_by_initial_world_size, throw=False)
        return Shadow(self._uneven, self._shadow, self._agree)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        group = self.process_group
        if isinstance(group, Communicator):
            raise UsageError(
                f"process_group is {group!r}; torch's Join counts ranks over a torch.distributed "
                "group: give the model such a one, or use its own join()"
            )
        return group

    def _joined_forward(self, *, reduces: bool, broadcasts: bool) -> int:
        """Tell the ranks that have ended of this one. The rank whose buffers hold. Collective."""
        uneven = self._uneven if self._join_config.enable else None
        self._reducer()[1].joined = uneven is not None
        if notified := Join.notify_join_context(self):
            notified.wait()
        if uneven is None:
            return 0
        waits = reduces and self._reducer()[1]._armed
        uneven.exchange(Status(1, int(reduces), int(broadcasts), int(waits)))
        self._reducer()[1].divisor = uneven.divisor
        return uneven.root

    def _agree(self) -> None:
        """Take what a rank holds that ended last. Collective."""
        comm, reducer = self._reducer()
        assert self._uneven is not None
        reducer._land()
        self._authoritative_rank = self._uneven.root
        self._broadcast(comm, buffers=self.forward_sync_buffers, root=self._uneven.root)

    def _shadow(self, status: Status) -> None:
        """What the others do in one forward and backward, without inputs.

        Reductions are waited for when the next begin: until then the others may come to forwards.
        """
        comm, reducer = self._reducer()
        assert self._uneven is not None
        begins = status.reduces and not status.waits
        if begins:
            reducer._land()
            reducer._rebuild_buckets()
        if status.broadcasts:
            replicas.broadcast(comm, self._named_buffers().values(), self._uneven.root)
        if begins:
            reducer.shadow()
            if any(t.sparse for t in reducer.parameters):
                reducer._land()  # these begin there
        self.require_forward_param_sync = bool(status.reduces)
