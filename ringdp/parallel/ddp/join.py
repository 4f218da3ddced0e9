"""DDP's join(): the module's side of `uneven_inputs`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.algorithms.join import JoinHook, _JoinConfig

from ringdp.parallel import replicas
from ringdp.parallel.ddp.base import Base
from ringdp.parallel.ddp.state import RESTING
from ringdp.parallel.ddp.uneven_inputs import Status, UnevenInputs
from ringdp.parallel.join import Shadow

ALONE = _JoinConfig(False, False, False)  # outside any join


class Joining(Base):
    """The part of DistributedDataParallel for ranks with unequal numbers of batches."""

    _advice = "the model such a one, or use its own join()"

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Inside it ranks may have unequal numbers of batches: see `uneven_inputs`. Collective.

        With `throw_on_early_termination` every rank raises ModelError once one has run out.
        """
        if not enable:
            yield
            return
        self.reducer.uneven = None
        uneven = self._uneven = UnevenInputs(
            self.comm, initial_size=divide_by_initial_world_size, throw=throw_on_early_termination
        )
        self._join_config = _JoinConfig(True, throw_on_early_termination, False)
        try:
            yield
            uneven.shadow(self._shadow)
            self._agree()
        finally:
            self._uneven, self._join_config = None, ALONE
            self.reducer.uneven = None

    def join_hook(self, *, divide_by_initial_world_size: bool = True, **_: Any) -> JoinHook:
        """For torch's Join, over a torch.distributed group. `_`: arguments of other joinables."""
        self.reducer.uneven = None
        uneven = UnevenInputs(self.comm, initial_size=divide_by_initial_world_size, throw=False)
        self._uneven = uneven
        return Shadow(lambda: self._shadow(uneven.exchange(Status())), self._agree)

    def _joined_forward(self, *, reduces: bool, broadcasts: bool) -> int:
        """Announce this forward to ranks that have run out. Returns the rank whose buffers count.
        Collective."""
        uneven = self._uneven if self._join_config.enable else None
        self._notify()
        if uneven is not None:
            waits = reduces and self.reducer.state is not RESTING
            uneven.exchange(Status(1, int(reduces), int(broadcasts), int(waits)))
        self.reducer.uneven = uneven
        return uneven.root if uneven else 0

    def _agree(self) -> None:
        """Take parameters and buffers of a rank that trained last. Collective."""
        assert self._uneven is not None
        self.reducer._land()
        self._authoritative_rank = self._uneven.root
        self._broadcast(buffers=self.forward_sync_buffers, root=self._uneven.root)

    def _shadow(self, status: Status) -> None:
        """Take part in one forward and backward of the others, without inputs.

        Reductions are waited for when the next ones start, as the others may run forwards first.
        """
        reducer = self.reducer
        assert self._uneven is not None
        begins = status.reduces and not status.waits
        if begins:
            reducer._land()
            reducer._rebuild_buckets()
        if status.broadcasts:
            replicas.broadcast(self.comm, self.named_module_buffers.values(), self._uneven.root)
        if begins:
            reducer.shadow()
            if any(t.sparse for t in reducer.parameters):
                reducer._land()  # these begin there
        self.require_forward_param_sync = bool(status.reduces)
