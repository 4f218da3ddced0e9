"""Handles of running collectives, one or a group: wait, test for completion, get the error."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from copy import copy

import torch

from ringdp.comm.arguments import check_wait_timeout
from ringdp.comm.call import describe
from ringdp.comm.graph_break import uncompiled
from ringdp.comm.guard import Guard
from ringdp.errors import CommunicationError
from ringdp.transport.records import Call
from ringdp.transport.repeated import SLICE
from ringdp.transport.threads import WAITING

_finishing = threading.RLock()  # reentrant: a signal handler may wait for another work meanwhile


@uncompiled
class Work:
    """The handle that every collective returns. The result is valid only after `wait`."""

    def __init__(
        self,
        guard: Guard,
        call: Call,
        ticket: int,
        finish: Callable[[], None] | None,
        waited: float = 0.0,
        gpu: torch.device | None = None,
    ) -> None:
        """`waited`: seconds that the call itself has waited. `gpu`: the tensors' GPU, if any."""
        self._guard, self._call, self._ticket, self._finish = guard, call, ticket, finish
        self._done, self._finishing, self._waited = False, False, waited
        self._gpu = gpu
        self._stream: torch.cuda.Stream | None = None  # in which `finish` ran
        self._error: CommunicationError | None = None

    def wait(self, timeout: float | None = None) -> None:
        """Block until the result is there, at most `timeout` seconds (default: the communicator's).

        On a GPU, block until the result is ready for later work in the current stream.

        Raises PeerLost, CollectiveTimeout or CollectiveMismatch, again on every call. If a signal
        handler interrupts `wait` while it copies the result and waits for the same work, this and
        `is_completed` raise CommunicationError there, as they would deadlock.
        """
        if self._error:
            raise copy(self._error)
        if self._done:
            self._sync_stream()
            return
        allowed = self._guard.transport.timeout if timeout is None else check_wait_timeout(timeout)
        waited, warn_at = self._waited, self._guard.warn_after
        start = time.monotonic() - waited
        try:
            # Wait in slices without the GIL: Python handles signals only between them.
            with WAITING:
                while not self._guard.transport.wait(
                    self._ticket, max(0.0, min(SLICE, allowed - waited))
                ):
                    if self._ended(self._guard.look):
                        break
                    waited = time.monotonic() - start
                    if waited >= allowed:
                        self._guard.give_up(self._call, allowed)
                    if waited >= warn_at:
                        self._guard.warn(self._call, waited)
                        warn_at = math.inf
        except CommunicationError as e:
            self._error = copy(e)  # without its traceback: see Guard.error
            raise
        except BaseException:  # of a signal's handler, such as Ctrl-C
            self._guard.left(self._call)
            raise
        if waited:
            self._guard.left(self._call)
        self._complete()

    def is_completed(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        if not self._done and self._guard.transport.wait(self._ticket, 0.0):
            self._complete()
        return self._done or self.exception() is not None

    def exception(self) -> CommunicationError | None:
        """Return the error that ended it, or None."""
        if not self._done and self._error is None:
            try:
                self._ended(self._guard.check)
            except CommunicationError as e:
                self._error = copy(e)
        return self._error

    def _ended(self, look: Callable[[Call], None]) -> bool:
        """Call `look`. If it raises but this call has ended, return True: a later call failed."""
        try:
            look(self._call)
        except CommunicationError:
            if not self._guard.transport.wait(self._ticket, 0.0):
                raise
            return True
        return False

    def _complete(self) -> None:
        if self._finish is not None:
            with _finishing:  # several threads may wait for one work
                if self._finishing:  # by this thread, which holds the lock
                    raise CommunicationError(
                        f"asked to wait for {describe(self._call)}, whose result is being copied "
                        "by the wait that this one has interrupted, as a signal's handler may; "
                        "allowed: to wait once that has returned, or for another work"
                    )
                if self._finish is not None:
                    try:
                        self._finishing = True
                        self._finish()
                        if self._gpu is not None:
                            self._stream = torch.cuda.current_stream(self._gpu)
                        self._finish = None  # releases the buffer
                    finally:
                        self._finishing = False
        self._sync_stream()
        self._done = True

    def _sync_stream(self) -> None:
        """On a GPU, make the current stream wait for the one in which `finish` ran."""
        if self._stream is not None:
            here = torch.cuda.current_stream(self._gpu)
            if here != self._stream:
                here.wait_stream(self._stream)


class _Ended(Work):
    """The work of a call that has completed."""

    def __init__(self) -> None:
        self._done, self._error, self._stream = True, None, None


ENDED = _Ended()


class Group:
    """Several works as one, such as those of a block `with comm.group():`.

    Calls in the block are issued immediately, in order, and waited for at its end. A group is
    neither a transaction nor a fusion: bits, messages and errors are those of the single calls.
    """

    def __init__(self, works: Iterable[Work] = ()) -> None:
        self.works = [*works]

    def wait(self, timeout: float | None = None) -> None:
        """Block until all results are there, at most `timeout` seconds in total.

        Raises the error of the first call that failed.
        """
        end = None if timeout is None else time.monotonic() + check_wait_timeout(timeout)
        for work in self.works:
            work.wait(None if end is None else max(0.0, end - time.monotonic()))

    def is_completed(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return all(w.is_completed() for w in self.works)

    def exception(self) -> CommunicationError | None:
        """Return the error of the first call that failed, or None."""
        return next((e for w in self.works if (e := w.exception())), None)
