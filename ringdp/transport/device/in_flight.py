"""Tracks the collectives in flight on a device until they end, with a watchdog thread.

The watchdog aborts when a rank has died, given up or failed, or when a collective has not ended in
`timeout` seconds. The abort ends whatever hangs on the device. `close` first waits for every
collective that a wait has returned for, as an abort would leave it half done.

Exit does the same, unless an error ends the process, which then waits for nobody. If a failure has
been raised by no call by then, it is reported and the process exits with 1.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from ringdp import _core
from ringdp.errors import UsageError
from ringdp.transport.base import Failure, FailureKind, Stamped, Transport
from ringdp.transport.c10d.transport import C10dTransport, attempt
from ringdp.transport.device.launch_queue import leave
from ringdp.transport.device.streams import End, streams
from ringdp.transport.records import Call
from ringdp.transport.store.failures import LOOK, Failed
from ringdp.transport.store.handshake import Handshake

PATIENCE = 5.0  # seconds that an abort may take before it is abandoned: it can hang as well
QUIET = 10 * LOOK  # seconds within which the watchdog notices that a collective has ended

Met = tuple[Tensor, End]  # the previous rank's stamp, and the event after which it can be read


class Given(NamedTuple):
    """What a transport is made of. It shares the store and the group with nobody."""

    store: Store
    group: ProcessGroup
    handshake: Handshake
    unheard: Callable[[Transport, Call, Failure], None]  # reports a failure that no call has raised


@dataclass(eq=False)
class InFlight:
    """One collective on the device. Stamps are compared as soon as they have arrived, not at its
    end: ranks that call different collectives can hang on the device, and then it never ends."""

    ticket: int
    until: float  # deadline (time.monotonic): past it, the collective has failed
    ours: Stamped
    kept: object  # buffers that must outlive it; None once a wait for it has returned
    met: Met | None  # None once the stamps agree
    end: End | None = None  # None while it is being issued


class Watching(C10dTransport):
    """One rank's end of a transport, without the issuing side, which is in `transport`."""

    heard: ClassVar[bool] = False  # whether any call in this process has raised a failure
    _staging: Tensor  # device memory that all collectives share

    def __init__(self, given: Given, device: torch.device) -> None:
        self.device = device
        super().__init__(given.store, given.group)
        self._unheard = given.unheard
        self._under_way: list[InFlight] = []
        self._captured: set[Tensor] = set()  # staging that captured graphs use when replayed
        self._streams = streams(self.device)

    @abstractmethod
    def _leave_device(self, *, hangs: bool) -> None:
        """Abort the device's work if it hangs; otherwise release it, which may wait for ranks of
        this host that have not closed."""

    def _leave_to_exit(self) -> None:
        """Prepare for process exit: destroy nothing whose destruction waits for other ranks."""

    def _failed(self, error: RuntimeError, ours: Stamped | None) -> Failed:
        """Translate an error that a library or driver raised in collective `ours`."""
        return Failed(FailureKind.ABORTED, self.rank, why=str(error).partition("\n")[0])

    @abstractmethod
    def _check_health(self) -> None:
        """Raise if something has failed. Called periodically, and when a collective has ended."""

    def failure(self) -> Failure | None:
        if found := super().failure():
            Watching.heard = True
        return found

    def fail(self, kind: FailureKind, rank: int) -> None:
        Watching.heard = True
        super().fail(kind, rank)

    def close(self) -> None:
        """Close once every collective that a wait has returned for has ended on the device, or
        something has failed."""
        if not self._forked:
            self._await_promised()
        super().close()

    def end(self) -> None:
        """See `Ending`. First let the watchdog count what the device has finished; otherwise the
        ranks still in that collective would lose this one."""
        if not self._forked:
            if not hasattr(sys, "last_type"):  # the error that ends the process
                self._await_promised()
            self._failures.wait_until(lambda: not self._busy(), QUIET)
            self._say_unheard()
        super().end()

    def _await_promised(self) -> None:
        self._failures.wait_until(lambda: all(w.kept is not None for w in list(self._under_way)))

    def _say_unheard(self) -> None:
        failure, number = self._failures.failure, self._status.under_way()
        if failure is None or failure.kind is FailureKind.STOPPED or Watching.heard:
            return
        if number is not None:
            call, _ = self._status.calls[number]
            self._unheard(self, call, failure)
            _core.fail_at_exit()

    def _await_quiet(self) -> None:
        """Wait until the watchdog has released all collectives.

        Raises UsageError if some are still under way after `QUIET` seconds.
        """
        self._failures.wait_until(lambda: not self._busy(), QUIET)
        if self._busy():
            raise UsageError(
                "capture with collectives under way; allowed: after torch.cuda.synchronize()"
            )

    @contextmanager
    def _translated(self, ours: Stamped | None = None) -> Iterator[None]:
        """Translate RuntimeErrors raised in the block into failures of the communicator."""
        try:
            yield
        except RuntimeError as e:
            raise self._failed(e, ours) from e

    def _finish(self, work: InFlight) -> None:
        self._check_health()
        self._status.end(work.ours.call[0])

    def _agrees(self, work: InFlight) -> bool:
        """Whether the stamps have arrived and match. Raises Failed if they differ."""
        if work.met is None:
            return True
        data, there = work.met
        if not there.query():
            return False
        work.met = None
        number, digest, elements = data.view(torch.int64).tolist()  # whatever a peer has sent
        if digest == work.ours.digest:
            return True
        before, found = (self.rank - 1) % self.ranks, (number, digest, elements)
        raise Failed(FailureKind.MISMATCH, before, work.ours.stamp, found)

    # --- on the watchdog thread

    def _look_after(self) -> None:
        try:
            attempt(self._failures, self._until_failure)
        finally:
            self._leave()

    def _until_failure(self) -> None:
        self._streams.watch()
        while self._failures.failure is None:
            # a graph replay notifies nobody, so poll
            self._failures.wait_until(self._busy, LOOK if self._captured else math.inf)
            with self._translated():
                self._reap()
                self._check_health()
            time.sleep(LOOK / 2)

    def _busy(self) -> bool:
        return bool(self._open or self._under_way)

    def _reap(self) -> None:
        """Release the collectives that the device has finished. Raises Failed for a late one."""
        works = list(self._under_way)
        for work in works:
            self._agrees(work)  # first: a stamp explains a failure better than a device error
        for work in works:
            if self._agrees(work) and work.end is not None and work.end.query():
                self._finish(work)
                self._under_way.remove(work)
                self._failures.changed.ring()
            elif time.monotonic() > work.until:
                raise Failed(FailureKind.TIMEOUT, self.rank)

    def _leave(self) -> None:
        """End the device's work. That can hang itself; then it is abandoned after `PATIENCE`."""
        hangs = self._busy()
        ending = threading.Thread(target=partial(self._let_go, hangs), daemon=True)
        try:
            ending.start()
        except RuntimeError:  # at exit no thread can be started, and this one may not wait
            self._leave_to_exit()
            return
        ending.join(PATIENCE)
        if hangs and ending.is_alive():
            leave(self.device)

    def _let_go(self, hangs: bool) -> None:
        """End the device's work and drop its memory here, as a thread that waits for a peer to end
        keeps this transport alive."""
        self._streams.watch()  # a user may capture
        with self._streams.current():
            self._leave_device(hangs=hangs)
            self._streams.drain()  # folds may have been queued behind the aborted work
            self._captured.clear()
            self._staging = self._streams.empty(0)
        for work in list(self._under_way):
            work.kept = None
