"""What a device has been given to do, until it has done it: a thread watches.

When a rank has died, given up or failed, it aborts, which ends what hangs on the device; as it does
where a collective has not ended in `timeout` seconds. What was waited for ends before `close` does,
or an abort would leave it half done.

At exit it is the same, but where an error ends the process, which then waits for nobody. What has
failed by then, and no call has raised, is said, and the process exits with 1.
"""

from __future__ import annotations

import os
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
from torch.distributed.distributed_c10d import Store

from ringdp import _core
from ringdp.errors import UsageError
from ringdp.transport.base import Failure, FailureKind, Transport
from ringdp.transport.c10d import wire
from ringdp.transport.c10d.transport import C10dTransport, Failed, attempt
from ringdp.transport.device.launch_queue import leave
from ringdp.transport.device.stamp import Stamped, unpacked
from ringdp.transport.device.streams import End, streams
from ringdp.transport.records import Call
from ringdp.transport.store.failures import LOOK
from ringdp.transport.store.handshake import Handshake

PATIENCE = 5.0  # seconds that an abort may last before it is left alone: it can hang as well
QUIET = 10 * LOOK  # seconds in which the watching thread has seen the end of what has ended

Met = tuple[Tensor, End]  # the stamp of the rank before, there from then on


class Given(NamedTuple):
    """What a transport is made of; store and group are for it alone."""

    store: Store
    group: wire.Group
    handshake: Handshake
    differ: Callable[[Call, Call], bool]  # whether two ranks' calls of a number are not the same
    unheard: Callable[[Transport, Call, Failure], None]  # says a failure that no call has raised


@dataclass(eq=False)
class InFlight:
    """Its stamps are compared when they have met, which is before its end and though that may
    never come: ranks that call different things can hang on the device."""

    ticket: int
    until: float  # when it has failed, if it has not ended
    ours: Stamped
    kept: object  # None once a wait for it has returned
    met: Met | None  # None once they agree
    end: End | None = None  # None while it is being issued


class Watching(C10dTransport):
    """One rank's end, but for what issues: see `transport`."""

    heard: ClassVar[bool] = False  # whether a call has raised a failure: of any in this process
    _staging: Tensor  # what all collectives share, on the device

    def __init__(self, given: Given, device: torch.device) -> None:
        self.device = device
        super().__init__(given.store, given.group)
        self._differ, self._unheard = given.differ, given.unheard
        self._under_way: list[InFlight] = []
        self._captured: set[Tensor] = set()  # memory of graphs, which may be replayed
        self._streams = streams(self.device)

    @abstractmethod
    def _leave_device(self, *, hangs: bool) -> None:
        """Abort what hangs, or end what has nothing to do: that may wait for ranks of this host
        that have not closed."""

    def _leave_to_exit(self) -> None:
        """The process ends: let nothing end before it that waits for others."""

    def _failed(self, error: RuntimeError, ours: Stamped | None) -> Failed:
        """What it means that a library or a driver has raised this, in that collective."""
        return Failed(FailureKind.ABORTED, self.rank, why=str(error).partition("\n")[0])

    @abstractmethod
    def _check_health(self) -> None:
        """Now and then, and when one has ended: raise if something has failed."""

    def failure(self) -> Failure | None:
        if found := super().failure():
            Watching.heard = True
        return found

    def fail(self, kind: FailureKind, rank: int) -> None:
        Watching.heard = True
        super().fail(kind, rank)

    def close(self) -> None:
        """Once what a wait has returned for has ended on the device, or something has failed."""
        if os.getpid() == self._process:
            self._await_promised()
        super().close()

    def end(self) -> None:
        """See `Ending`. What has ended on the device counts, or who is still in it would lose this
        rank."""
        if os.getpid() == self._process:
            if not hasattr(sys, "last_type"):  # the error that ends the process
                self._await_promised()
            self._failures.changed.wait_for(
                lambda: self._failures.failure or not self._busy(), QUIET
            )
            self._say_unheard()
        super().end()

    def _await_promised(self) -> None:
        self._failures.changed.wait_for(
            lambda: self._failures.failure or all(w.kept is not None for w in list(self._under_way))
        )

    def _say_unheard(self) -> None:
        failure, number = self._failures.failure, self._status.under_way()
        if failure is None or failure.kind is FailureKind.STOPPED or Watching.heard:
            return
        if number is not None and (call := self.call(self.rank, number)) is not None:
            self._unheard(self, call, failure)
            _core.fail_at_exit()

    def _await_quiet(self) -> None:
        """Until the watching thread has let go of what has ended. UsageError if that is not all."""
        self._failures.changed.wait_for(lambda: not self._busy() or self._failures.failure, QUIET)
        if self._busy():
            raise UsageError(
                "capture with collectives under way; allowed: after torch.cuda.synchronize()"
            )

    @contextmanager
    def _translated(self, ours: Stamped | None = None) -> Iterator[None]:
        """Errors in the block, as failures of the communicator."""
        try:
            yield
        except RuntimeError as e:
            raise self._failed(e, ours) from e

    def _finish(self, work: InFlight) -> None:
        self._check_health()
        self._status.end(work.ours.call[0])

    def _agrees(self, work: InFlight) -> bool:
        """Whether its stamps have met. Raises Failed where they differ."""
        if work.met is None:
            return True
        data, there = work.met
        if not there.query():
            return False
        work.met = None
        ours, theirs = work.ours, unpacked(data)
        if ours.digest == theirs.digest and not self._differ(ours.call, theirs.call):
            return True
        raise Failed(FailureKind.MISMATCH, (self.rank - 1) % self.ranks, (ours.short, theirs.short))

    # --- on the thread that watches

    def _look_after(self) -> None:
        try:
            attempt(self._failures, self._until_failure)
        finally:
            self._leave()

    def _until_failure(self) -> None:
        self._streams.watch()
        while self._failures.failure is None:
            self._failures.changed.wait_for(
                lambda: self._busy() or self._failures.failure,
                LOOK if self._captured else None,  # replays of graphs tell nobody
            )
            with self._translated():
                self._reap()
                self._check_health()
            time.sleep(LOOK / 2)

    def _busy(self) -> bool:
        return bool(self._open or self._under_way)

    def _reap(self) -> None:
        """Let go of what the device has done; what it does not do in time has failed."""
        works = list(self._under_way)
        for work in works:
            self._agrees(work)  # first, as stamps say more than a device does
        for work in works:
            if self._agrees(work) and work.end is not None and work.end.query():
                self._finish(work)
                self._under_way.remove(work)
                self._failures.changed.ring()
            elif time.monotonic() > work.until:
                raise Failed(FailureKind.TIMEOUT, self.rank)

    def _leave(self) -> None:
        """End what there is on the device, which can hang itself: then it is left alone."""
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
        """And of the device's memory: a thread that waits for a peer's end keeps this transport."""
        self._streams.watch()  # a user may capture
        with self._streams.current():
            self._leave_device(hangs=hangs)
            self._streams.drain()  # folds may have been behind what was aborted
            self._captured.clear()
            self._staging = self._streams.empty(0)
        for work in list(self._under_way):
            work.kept = None
