"""What one DDP works with: a communicator, and a reducer with another. A copy makes its own."""

from __future__ import annotations

from ringdp.comm import Communicator, communicator_of
from ringdp.parallel.ddp.builtin import BuiltIn
from ringdp.parallel.ddp.hook import CommHook
from ringdp.parallel.ddp.journal import Journal
from ringdp.parallel.ddp.mixed import Mixed
from ringdp.parallel.ddp.reducer import Reducer
from ringdp.parallel.ddp.settings import Settings, Trainable


class Holding:
    """The part of DistributedDataParallel that has them."""

    settings: Settings
    _trainable: list[Trainable]
    _mixed: Mixed
    _journal: Journal
    _hook: CommHook | BuiltIn | None
    _comm: Communicator | None
    _reducer: Reducer | None

    @property
    def comm(self) -> Communicator:
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
        made = Reducer(self._trainable, comm, self.settings, self._mixed, self._journal)
        made.hook = self._hook or self._mixed.hook(comm)
        self._reducer = made
        return made
