"""The part of DDP that has the model's state, the communicator, and the reducer."""

from __future__ import annotations

from torch import Tensor, nn

from ringdp.comm import Communicator, communicator_of
from ringdp.parallel import replicas
from ringdp.parallel.ddp.comm_hooks import BuiltIn, CommHook
from ringdp.parallel.ddp.mixed_precision import MixedPrecision
from ringdp.parallel.ddp.reducer import Reducer
from ringdp.parallel.ddp.runtime_log import RuntimeLog
from ringdp.parallel.ddp.settings import Settings, Trainable
from ringdp.parallel.ddp.uneven_inputs import UnevenInputs
from ringdp.parallel.join import JoinableOverGroup


class Base(JoinableOverGroup):
    """Base class of the parts of DistributedDataParallel."""

    module: nn.Module
    parameters_to_ignore: set[str]
    settings: Settings
    forward_sync_buffers: bool
    require_forward_param_sync: bool  # whether the last forward reduced
    _trainable: list[Trainable]
    _mixed_precision: MixedPrecision
    _runtime_log: RuntimeLog
    _hook: CommHook | BuiltIn | None
    _comm: Communicator | None
    _reducer: Reducer | None
    _uneven: UnevenInputs | None
    _authoritative_rank: int | None  # whose values all took in the last join

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers to synchronize. Looked up each time, since a model may replace a buffer."""
        ignored = self.parameters_to_ignore
        return {name: b for name, b in self.module.named_buffers() if name not in ignored}

    def _state(self) -> list[nn.Parameter]:
        ignored = self.parameters_to_ignore
        return [p for name, p in self.module.named_parameters() if name not in ignored]

    def _broadcast(self, *, buffers: bool, root: int = 0) -> None:
        """Broadcast parameters, and `buffers` too, from rank `root`. Collective."""
        state = [*self._state(), *(self.named_module_buffers.values() if buffers else ())]
        replicas.broadcast(self.comm, state, root)

    @property
    def comm(self) -> Communicator:  # type: ignore[override]
        """A copy of the module gets the default one."""
        if self._comm is None:
            self._comm = communicator_of(None, (t.parameter for t in self._trainable))
        return self._comm

    @property
    def reducer(self) -> Reducer:
        """A copy of the module makes its own when it is first read. Collective then."""
        try:
            return self._reducer or self._make_reducer()
        except AttributeError as error:  # nn.Module would report a missing attribute
            raise RuntimeError(f"the reducer could not be made: {error}") from error

    def _make_reducer(self) -> Reducer:
        comm = self.comm.duplicate()
        made = Reducer(
            self._trainable, comm, self.settings, self._mixed_precision, self._runtime_log
        )
        made.hook = self._hook or self._mixed_precision.hook
        self._reducer = made
        return made
