"""What one DDP works with: the model's state, a communicator, and a reducer with another."""

from __future__ import annotations

from torch import Tensor, nn

from ringdp.comm import Communicator, communicator_of
from ringdp.parallel import replicas
from ringdp.parallel.ddp.builtin_hooks import BuiltIn
from ringdp.parallel.ddp.comm_hooks import CommHook
from ringdp.parallel.ddp.mixed_precision import MixedPrecision
from ringdp.parallel.ddp.reducer import Reducer
from ringdp.parallel.ddp.runtime_log import RuntimeLog
from ringdp.parallel.ddp.settings import Settings, Trainable
from ringdp.parallel.ddp.uneven_inputs import UnevenInputs
from ringdp.parallel.join import JoinableOverGroup


class Base(JoinableOverGroup):
    """The part of DistributedDataParallel that has them."""

    module: nn.Module
    parameters_to_ignore: set[str]
    settings: Settings
    forward_sync_buffers: bool
    require_forward_param_sync: bool  # whether the last forward reduced: buffers may have changed
    _trainable: list[Trainable]
    _mixed_precision: MixedPrecision
    _runtime_log: RuntimeLog
    _hook: CommHook | BuiltIn | None
    _comm: Communicator | None
    _reducer: Reducer | None
    _uneven: UnevenInputs | None
    _authoritative_rank: int | None  # whose values held at the end of the last join

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """Those that are brought together. Anew each time: a model may put another tensor in a
        buffer's place."""
        ignored = self.parameters_to_ignore
        return {name: b for name, b in self.module.named_buffers() if name not in ignored}

    def _state(self) -> list[nn.Parameter]:
        ignored = self.parameters_to_ignore
        return [p for name, p in self.module.named_parameters() if name not in ignored]

    def _broadcast(self, *, buffers: bool, root: int = 0) -> None:
        """Parameters, and buffers, take that rank's values. Collective."""
        state = [*self._state(), *(self.named_module_buffers.values() if buffers else ())]
        replicas.broadcast(self.comm, state, root)

    @property
    def comm(self) -> Communicator:  # type: ignore[override]
        """A copy's is the default one."""
        if self._comm is None:
            self._comm = communicator_of(None, (t.parameter for t in self._trainable))
        return self._comm

    @property
    def reducer(self) -> Reducer:
        """A copy's is made in its first forward, or where it is read before. Collective then."""
        try:
            return self._reducer or self._make_reducer()
        except AttributeError as error:  # a module would say that it has none
            raise RuntimeError(f"the reducer could not be made: {error}") from error

    def _make_reducer(self) -> Reducer:
        comm = self.comm.duplicate()
        made = Reducer(
            self._trainable, comm, self.settings, self._mixed_precision, self._runtime_log
        )
        made.hook = self._hook or self._mixed_precision.hook
        self._reducer = made
        return made
