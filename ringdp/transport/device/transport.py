"""Collectives on a device: one thread issues them, another watches, and gloo carries the rest.

The issuing thread runs them in call order (see `launch_queue`); the watchdog is in `in_flight`.
Tagged messages, CPU tensors beside a GPU, and failure reports go over gloo, because a device does
not report that a rank is gone.

On CUDA a wait returns once the caller's stream is ordered behind the collective, as in torch.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from ringdp.errors import UsageError
from ringdp.transport.base import FailureKind, Run, Stamped
from ringdp.transport.device.in_flight import Given, InFlight, Met, Watching
from ringdp.transport.device.launch_queue import launches
from ringdp.transport.records import Call
from ringdp.transport.store.failures import Failed


class DeviceTransport(Watching):
    """The part of a device transport that does not depend on how bytes move. See `Transport`."""

    def __init__(self, given: Given, device: torch.device) -> None:
        """Collective. `device` is the CPU for a transport that runs device code on host memory.

        Raises CommunicationError if the ranks do not meet.
        """
        super().__init__(given, device)
        self._launching = threading.Lock()  # held by a launch, which uses what leaving frees
        # By ticket: the host tensor that a message is received in, and its device destination.
        self._arrivals: dict[int, tuple[Tensor, Tensor]] = {}
        self._launches = self._jobs if device.type == "cpu" else launches(self.device)
        self._launches.put(self._streams.watch)  # a user may capture while it allocates
        given.handshake.run(self._come)
        if self.ranks > 1:
            self._look_after_rank((self.rank + 1) % self.ranks)
        self._spawn(self._look_after)

    # --- how bytes move

    def _come(self) -> None:
        with self._streams.current():
            self._staging = self._streams.empty(0)
            self._join()

    @abstractmethod
    def _join(self) -> None:
        """Connect to the other ranks. Collective."""

    def _exchange(self, ours: Stamped) -> Met | None:
        """Enqueue a stamp exchange: send ours to the next rank, receive the previous rank's. If all
        neighbours in this ring agree, all ranks do; ranks that call different collectives would
        hang, or get garbage.

        Returns None if `_execute` itself checks that the ranks agree.
        """
        return None

    @abstractmethod
    def _execute(self, ours: Stamped, run: Run, buffer: Tensor) -> int:
        """Enqueue a program in the streams. Returns the bytes that it sends."""

    # --- for the communicator

    def _start(self, run: Run, call: Call, whole: Tensor | None, part: Tensor | None) -> int:
        assert whole is not None
        if whole.device != self.device:
            return super()._start(run, call, whole, part)
        ours = self._stamped(call, uneven=run.uneven)
        return self._issue(ours, partial(self._execute, ours, run, whole), whole)

    def check(self, buffer: Tensor) -> None:
        self._check_process()
        if buffer.device.type != "cpu" and buffer.device != self.device:
            raise UsageError(
                f"this communicator moves tensors on {self.device}, and CPU tensors; this one is "
                f"on {buffer.device}"
            )

    def send(self, buffer: Tensor, to: int, kind: int, *, background: bool) -> int:
        self.check(buffer)
        return super().send(buffer.cpu(), to, kind, background=background)

    def receive(
        self, buffer: Tensor, sender: int | None, kind: int, source: Tensor, *, background: bool
    ) -> int:
        self.check(buffer)
        host = buffer if buffer.device.type == "cpu" else torch.empty_like(buffer, device="cpu")
        ticket = super().receive(host, sender, kind, source, background=background)
        if host is not buffer:
            self._arrivals[ticket] = host, buffer
        return ticket

    def wait(self, ticket: int, timeout: float) -> bool:
        if not super().wait(ticket, timeout):
            return False
        if ticket in self._arrivals:
            host, buffer = self._arrivals[ticket]
            buffer.copy_(host)
            self._arrivals.pop(ticket, None)
        for work in list(self._under_way):
            if work.ticket == ticket and work.end is not None:
                self._streams.settle(work.end)
                work.kept = None  # the allocator reuses it in the order of the caller's stream
        return True

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def await_device(self) -> None:
        """Block until the watchdog has released all collectives, or something has failed."""
        self._check_process()
        launched = list[bool]()

        def tell() -> None:
            launched.append(True)
            self._failures.changed.ring()

        self._launches.put(tell)
        self._failures.wait_until(lambda: launched and not self._under_way)

    # --- issuing: `_run_on_device` is on the issuing thread, unless a graph is captured

    def _issue(self, ours: Stamped, act: Callable[[], int], kept: object) -> int:
        if self._streams.capturing():
            return self._capture(ours, act)
        ticket, arrival = next(self._tickets), self._streams.arrival()
        job = partial(self._run_on_device, ticket, ours, arrival, act, kept)
        return self._hand_over(self._launches, ticket, ours, job)

    def _run_on_device(
        self, ticket: int, ours: Stamped, arrival: object, act: Callable[[], int], kept: object
    ) -> None:
        until = time.monotonic() + self.timeout
        with self._launch(arrival, ours):
            work = InFlight(ticket, until, ours, kept, self._exchange(ours))
            if not (at_once := self._agrees(work)):
                self._under_way.append(work)
            sent = act()
            work.end = self._streams.end()
            if at_once and work.end.query():
                self._finish(work)
            elif at_once:
                self._under_way.append(work)
        self._end(ticket, sent)

    @contextmanager
    def _launch(self, arrival: object, ours: Stamped | None = None) -> Iterator[None]:
        """Within the block, the work of collective `ours` can be put in the streams, behind
        `arrival`. Raises Failed once the device's work is being aborted."""
        with self._launching, self._streams.current(), self._translated(ours):
            if self._failures.failure is not None:
                raise Failed(FailureKind.STOPPED, self.rank)
            self._streams.follow(arrival)
            yield

    def _capture(self, ours: Stamped, act: Callable[[], int]) -> int:
        """Capture the collective in a CUDA graph, on the caller's thread. No stamps are exchanged,
        as replays are not compared. The caller's stream is ordered behind it at once."""
        self._await_quiet()
        ticket, arrival, sent = next(self._tickets), self._streams.arrival(), 0
        try:
            with self._launch(arrival):
                sent, end = act(), self._streams.end()
            self._streams.settle(end)
        except Failed as e:
            self._failures.fail(e)

        def captured() -> None:
            if self._failures.failure is None:  # else a wait for it raises the failure
                self._status.end(ours.call[0])
                self._end(ticket, sent)

        return self._hand_over(self._jobs, ticket, ours, captured)

    def _room(self, needed: int) -> Tensor:
        if len(self._staging) < needed:
            if self._streams.capturing():
                raise self._uncapturable(
                    f"{needed} bytes of staging; there are {len(self._staging)}"
                )
            # A capture writes to it on the caller's thread, maybe outside inference mode.
            with torch.inference_mode(False):
                self._staging = self._streams.empty(needed)
        if self._streams.capturing():
            self._captured.add(self._staging)
        return self._staging[:needed]

    def _uncapturable(self, needed: str) -> UsageError:
        return UsageError(
            f"a collective in a CUDA graph needs {needed}: run it once before the capture"
        )
