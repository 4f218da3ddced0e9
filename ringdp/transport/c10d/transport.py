"""Programs over any torch.distributed group: gloo between hosts, for instance.

A thread runs the rows in order, another begins the messages. What either sends goes out beside
them, so it waits only for what it receives. Failures go through the group's store: a dead rank is
seen by those that wait for it, since its connections end, and soon by all. What closes, is
collected while nothing is under way, or is there at exit, ends what its threads wait for, and its
connections: see `shutdown`.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from ringdp.errors import UsageError
from ringdp.schedule.program import NONE
from ringdp.transport import threads
from ringdp.transport.arena import Arena
from ringdp.transport.base import (
    MESSAGE,
    Exchange,
    Failure,
    FailureKind,
    Issued,
    Prepared,
    Run,
    Stamp,
)
from ringdp.transport.c10d import wire
from ringdp.transport.c10d.shutdown import cut, hold, retire, until_it_ends
from ringdp.transport.c10d.wire import COLLECTIVE, rest_tag, tag_of
from ringdp.transport.records import Call
from ringdp.transport.rows import Rows, Unequal
from ringdp.transport.store.failures import Failures, somebody
from ringdp.transport.store.processes import check_process
from ringdp.transport.store.status import Reporting, listen

SHORT = 64 << 10  # bytes of a message that its sender does not wait for, as in shared memory
GOLDEN = 0x9E3779B97F4A7C15  # see csrc/progress.hpp


class _Job(NamedTuple):
    ticket: int
    run: Run
    buffer: Tensor
    call: Call
    digest: int  # of its kind and those of all before it


class Failed(Exception):
    """Of a kind, by a rank; with what was expected and found if it was a message, or why."""

    def __init__(
        self,
        kind: FailureKind,
        rank: int,
        stamps: tuple[Stamp, Stamp] | None = None,
        why: str = "",
    ) -> None:
        self.told = kind, rank, stamps, why


class C10dTransport(Reporting):
    """One rank's end of a group. See `Transport`."""

    depth: float | None = math.inf  # what is sent waits in memory
    own: str | None = None
    timeout = math.inf
    device = torch.device("cpu")
    ready = tape = link = None
    arena: Arena | None = None

    def __init__(self, store: Store, group: wire.Group) -> None:
        """`store` and `group` are for this transport alone."""
        super().__init__(store, group.rank(), group.size())
        self._group, self._process = group, os.getpid()
        self._tickets, self._rests = count(1), count()
        self._digest, self._sent = 1, 0
        self._open = dict[int, None]()  # tickets of what has not ended
        self._watched = False
        self._jobs, self._letters = threads.Queue("ringdp-c10d"), threads.Queue("ringdp-c10d")
        self._sending: WeakSet[threading.Thread] = WeakSet()  # what nobody waits for
        # Runs at `close`, or when the transport is collected, which idle threads do not keep.
        ends = self._failures, self._status, self._store, (self._jobs, self._letters)
        self._stop = weakref.finalize(self, retire, *ends, group, self._sending, self._process)
        self._stop.atexit = False
        threads.at_exit(self)
        self._spawn(partial(listen, self._failures, self._status))

    @property
    def issued(self) -> int:
        return self._status.begun

    def prepare(self, what: Run | Exchange) -> Prepared:
        assert isinstance(what, Run), "a transport without a way of its own exchanges nothing"
        return Issued(self, partial(self._start, what), what.kind, what.elements)

    def _start(self, run: Run, call: Call, whole: Tensor | None, _: Tensor | None) -> int:
        assert whole is not None
        digest, ticket = self._digested(run.kind), next(self._tickets)
        job = _Job(ticket, run, whole, call, digest)
        return self._hand_over(self._jobs, partial(self._run, job), ticket, call, digest)

    def _hand_over(
        self, queue: threads.Queue, act: Callable[[], None], ticket: int, call: Call, digest: int
    ) -> int:
        """A collective to the thread that runs it."""
        put, job = queue.put, partial(attempt, self._failures, act)
        board, number, called = self._status, call[0], (call, time.monotonic())
        # See Note [Ctrl-C comes after any call] in threads.py.
        self._digest = digest
        self._open[ticket] = None
        board.calls[number] = called
        board.begun = number + 1
        put(job)
        return ticket

    def _post(self, act: Callable[[], None], ticket: int) -> int:
        """The same for a message, in the order of the calls."""
        put, job = self._letters.put, partial(attempt, self._failures, act)
        self._open[ticket] = None
        put(job)
        return ticket

    def send(self, buffer: Tensor, to: int, kind: int, *, background: bool) -> int:
        self.check(buffer)
        tag, rest, ticket = tag_of(kind), next(self._rests), next(self._tickets)
        size = buffer.nbytes

        def begin() -> None:
            with self._talking(to):
                parts = wire.send(self._group, buffer, to, (rest, kind, 0), tag, rest_tag(rest))
            if size <= SHORT:
                self._end(ticket, size)
                self._sending.add(self._spawn(partial(hold, parts)))
            else:
                self._spawn(partial(finish, parts))

        def finish(parts: list[wire.Pending]) -> None:
            for part in parts:
                self._until(part, to)
            self._end(ticket, size)

        return self._post(begin, ticket)

    def receive(
        self, buffer: Tensor, sender: int | None, kind: int, source: Tensor, *, background: bool
    ) -> int:
        self.check(buffer)
        tag, who, ticket = tag_of(kind), -1 if sender is None else sender, next(self._tickets)

        def begin() -> None:
            if sender is None:
                self._watch()
            with self._talking(who):
                message = wire.Incoming(self._group, who, tag)
            self._spawn(partial(finish, message))

        def finish(message: wire.Incoming) -> None:
            self._until(message.first, who)
            peer = message.first._source_rank() if sender is None else sender
            rest, found, size = message.stamp
            if (found, size) != (kind, buffer.nbytes):
                expected = MESSAGE, kind, buffer.nbytes
                raise Failed(FailureKind.MISMATCH, peer, (expected, (MESSAGE, found, size)))
            with self._talking(peer):
                message.take(buffer, peer, rest_tag(rest), lambda part: self._until(part, peer))
            source[0] = peer
            self._end(ticket)

        return self._post(begin, ticket)

    def check(self, buffer: Tensor) -> None:
        if buffer.device.type != "cpu":
            raise UsageError(f"this transport moves CPU tensors; this one is on {buffer.device}")
        self._check_process()

    def _check_process(self) -> None:
        check_process(self._process)

    def release(self) -> None:
        """Nothing: jobs hold what they need."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def wait(self, ticket: int, timeout: float) -> bool:
        self._failures.changed.wait_for(
            lambda: ticket not in self._open or self._failures.failure, timeout
        )
        if ticket in self._open and self._failures.failure is None and timeout > 0:
            self._letters.put(self._watch)
        return ticket not in self._open

    def failure(self) -> Failure | None:
        return self._failures.failure

    def fail(self, kind: FailureKind, rank: int) -> None:
        self._failures.fail(kind, rank)

    def sent_bytes(self) -> int:
        return self._sent

    def await_device(self) -> None:
        """There is none."""

    def close(self) -> None:
        threads.complete(self._stop)

    def end(self) -> None:
        """See `Ending`."""
        C10dTransport.close(self)  # at exit nobody waits for a device
        if os.getpid() == self._process:
            threads.join(list(self._sending))
            cut(self._group)

    # --- on threads of its own

    def _spawn(self, act: Callable[[], None]) -> threading.Thread:
        return threads.spawn(partial(attempt, self._failures, act), "ringdp-c10d")

    def _digested(self, kind: int) -> int:
        """Of that collective's kind, if it is the next, and those of all before it."""
        return (self._digest ^ kind) * GOLDEN % (1 << 62)

    def _run(self, job: _Job) -> None:
        if self._failures.failure is not None:
            return  # after which none ends
        run = job.run
        rows = Rows(run.program, job.buffer, run.bounds, run.op)
        sends: list[tuple[wire.Pending, int, int]] = []
        bytes_sent = 0
        for row in run.program:
            self._status.waits(row.round, row.recv_peer)
            room = rows.room(row) if row.recv_peer != NONE else None
            received = None if row.recv_peer == NONE else self._received(row.recv_peer, job, room)
            try:
                sent = rows.run(row, received)
            except Unequal:
                raise Failed(FailureKind.MISMATCH, somebody(row.recv_peer, self.rank)) from None
            if sent is not None:
                stamp = job.call[0], job.digest, 0
                with self._talking(row.send_peer):
                    parts = wire.send(
                        self._group, sent, row.send_peer, stamp, COLLECTIVE, COLLECTIVE
                    )
                sends += [(part, row.send_peer, row.round) for part in parts]
                bytes_sent += sent.nbytes
        rows.end()
        for part, peer, round_ in sends:
            self._status.waits(round_, peer)
            self._until(part, peer)
        self._status.end(job.call[0])
        self._end(job.ticket, bytes_sent)

    def _received(self, peer: int, job: _Job, room: int | None) -> Tensor:
        with self._talking(peer):
            message = wire.Incoming(self._group, peer, COLLECTIVE)
        self._until(message.first, peer)
        found, size = message.stamp, job.buffer.element_size()
        expected = job.call[0], job.digest, found[2] if room is None else room * size
        whole = job.buffer.numel() * size
        if found != expected or found[2] % size or not 0 <= found[2] <= whole:
            raise Failed(FailureKind.MISMATCH, peer, (expected, found))
        value = job.buffer.new_empty(found[2] // size)
        with self._talking(peer):
            message.take(value, peer, COLLECTIVE, lambda part: self._until(part, peer))
        return value

    @contextmanager
    def _talking(self, peer: int) -> Iterator[None]:
        """An error in the block means that `peer`, or -1: somebody, has gone."""
        try:
            yield
        except RuntimeError as e:
            raise Failed(FailureKind.LOST, somebody(peer, self.rank)) from e

    def _until(self, part: wire.Pending, peer: int) -> None:
        with self._failures.waits_for(peer), self._talking(peer):
            part.wait(wire.LONG)

    def _watch(self) -> None:
        """Look after every rank from now on: who waits for one hears of no other's death."""
        if self._watched:
            return
        self._watched = True
        for rank in range(self.ranks):
            if rank != self.rank:
                self._look_after_rank(rank)

    def _look_after_rank(self, rank: int) -> None:
        self._spawn(partial(until_it_ends, self._group, self._failures, rank))

    def _busy(self) -> bool:
        return bool(self._open)

    def _end(self, ticket: int, sent: int = 0) -> None:
        with self._failures.lock:
            self._sent += sent
            self._open.pop(ticket, None)
        self._failures.changed.ring()


def attempt(failures: Failures, act: Callable[[], None]) -> None:
    """What ends it by an error has failed for all."""
    try:
        act()
    except Failed as e:
        failures.fail(*e.told)
    except BaseException:
        failures.fail(FailureKind.ABORTED, failures.rank)  # else all would wait for it
        raise
