"""The transport over gloo, between hosts too.

One thread runs the rows in order. It sends asynchronously, so it waits only for what it receives.
The caller starts a message, and a thread of a pool waits for it, as a wait in gloo knows neither
Ctrl-C nor a timeout that spares the connections. Failures go through the group's store: ranks that
wait for a dead rank see its connections drop, and all others soon read of it. A transport that is
closed, collected while idle, or alive at exit ends its threads' waits and its connections: see
`shutdown`.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import count
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import Store

from ringdp.schedule.program import Row
from ringdp.transport import threads
from ringdp.transport.base import (
    MESSAGE,
    Exchange,
    Failure,
    FailureKind,
    Issued,
    Prepared,
    Run,
    Stamped,
    Transport,
)
from ringdp.transport.c10d import wire
from ringdp.transport.c10d.receiving import Receiving
from ringdp.transport.c10d.shutdown import Sending, cut, retire, watch_for_end
from ringdp.transport.c10d.wire import COLLECTIVE, INLINE, tag_of
from ringdp.transport.records import Call, Observed, RankRecord
from ringdp.transport.rows import Rows, Unequal
from ringdp.transport.store.client import StoreClient
from ringdp.transport.store.failures import Failed, Failures
from ringdp.transport.store.status import StatusBoard, listen

GOLDEN = 0x9E3779B97F4A7C15  # see csrc/progress.hpp


class C10dTransport(Transport):
    """One rank's end of a group."""

    device = torch.device("cpu")
    depth: float | None = math.inf  # sent messages wait in memory

    def __init__(self, store: Store, group: ProcessGroup) -> None:
        """`store` and `group` must not be used by anything else."""
        self.rank, self.ranks = group.rank(), group.size()
        self._group, self._process = group, os.getpid()
        self._store = StoreClient(lambda: store)
        whole = self._store, self.rank, self.ranks
        busy = WeakMethod(self._busy)  # the listening thread must not keep the transport alive
        self._failures = Failures(*whole, lambda: bool((ask := busy()) and ask()))
        self._status = StatusBoard(*whole)
        self._tickets, self._numbers = count(1), count()  # the latter of messages
        self._digest, self._sent = 1, 0
        self._open = dict[int, None]()  # tickets of collectives and messages that have not ended
        self._unwatched = {*range(self.ranks)} - {self.rank}  # see `_watch`
        # Of the running collective, or of the one that failed. If gloo is to move what has been
        # freed, its thread polls without end.
        self._moving: object = None
        self._jobs, self._waits = threads.Queue("ringdp-c10d"), threads.Pool("ringdp-c10d")
        self._sending = Sending()
        # Runs at `close` or when the transport is collected; idle threads do not keep it alive.
        ends = self._failures, self._status, self._store, (self._jobs, self._waits)
        self._stop = weakref.finalize(self, retire, *ends, group, self._sending, self._process)
        self._stop.atexit = False
        threads.at_exit(self)
        self._spawn(partial(listen, self._failures, self._status))

    @property
    def issued(self) -> int:
        return self._status.begun

    def prepare(self, what: Run | Exchange) -> Prepared:
        assert isinstance(what, Run), "a transport without its own algorithm runs only programs"
        return Issued(self, what, partial(self._start, what))

    def _start(self, run: Run, call: Call, whole: Tensor | None, _: Tensor | None) -> int:
        assert whole is not None
        ticket, ours = next(self._tickets), self._stamped(call, uneven=run.uneven)
        return self._hand_over(
            self._jobs, ticket, ours, partial(self._run, ticket, ours, run, whole)
        )

    def _stamped(self, call: Call, *, uneven: bool = False) -> Stamped:
        """Return the call as that of the next collective. `uneven`: see `Run`."""
        _, kind, elements, _ = call
        digest = self._digest
        for agreed in (kind, 0 if uneven else elements):
            digest = (digest ^ agreed) * GOLDEN % (1 << 62)
        return Stamped(call, digest)

    def _hand_over(
        self, queue: threads.Queue, ticket: int, ours: Stamped, act: Callable[[], None]
    ) -> int:
        """Queue a collective for the thread that runs it. Returns its ticket."""
        put, job = queue.put, partial(attempt, self._failures, act)
        board, number, called = self._status, ours.call[0], (ours.call, time.monotonic())
        # See Note [Ctrl-C comes after any call] in threads.py.
        self._digest = ours.digest
        self._open[ticket] = None
        board.calls[number] = called
        board.begun = number + 1
        put(job)
        return ticket

    def _begin(self, ticket: int, peer: int, *begins: Callable[[], object]) -> None:
        """Open a message and make these C calls. If they fail, its peer is lost. See Note [Ctrl-C
        comes after any call] in threads.py: no Work of gloo's may be dropped on the way."""
        opens = partial(self._open.__setitem__, ticket, None)
        try:
            threads.in_a_row(opens, *begins)
        except RuntimeError:
            self._failures.fail(Failed(FailureKind.LOST, peer))

    def _waiting(self, act: Callable[[], None]) -> Callable[[], None]:
        """Return a C call that lets a thread `act`, which blocks."""
        return partial(self._waits.put, partial(attempt, self._failures, act))

    def send(self, buffer: Tensor, to: int, kind: int, *, background: bool) -> int:
        self.check(buffer)
        tag, number, ticket = tag_of(kind), next(self._numbers), next(self._tickets)
        size, parts = buffer.nbytes, list[Work]()
        starts = partial(parts.extend, wire.sends(self._group, buffer, to, tag, number, kind))

        def finish() -> None:
            for part in parts:
                self._until(part, to)
            self._end(ticket, size)

        if size > INLINE:
            self._begin(ticket, to, starts, self._waiting(finish))
            return ticket
        ends = partial(self._open.pop, ticket, None)
        self._begin(ticket, to, starts, partial(self._sending.add, parts), ends)
        with self._failures.lock:
            self._sent += size
        if self._sending.is_full():
            self._waits.put(self._sending.hold)
        return ticket

    def receive(
        self, buffer: Tensor, sender: int | None, kind: int, source: Tensor, *, background: bool
    ) -> int:
        self.check(buffer)
        who, ticket = -1 if sender is None else sender, next(self._tickets)
        message = wire.Incoming(self._group, who, tag_of(kind))

        def finish() -> None:
            if sender is None:
                self._watch()
            self._until(message.first, who)
            peer = message.first._source_rank() if sender is None else sender
            _, found, size = message.stamp
            if (found, size) != (kind, buffer.nbytes):
                expected = MESSAGE, kind, buffer.nbytes
                raise Failed(FailureKind.MISMATCH, peer, expected, (MESSAGE, found, size))
            with self._talking(peer):
                part = message.begin(buffer, peer)
            if part is not None:
                self._until(part, peer)
            source[0] = peer
            self._end(ticket)

        self._begin(ticket, who, message.post, self._waiting(finish))
        return ticket

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu")

    def wait(self, ticket: int, timeout: float) -> bool:
        self._failures.wait_until(lambda: ticket not in self._open, timeout)
        late = ticket in self._open and self._failures.failure is None and timeout > 0
        if late and self._unwatched:
            self._waits.put(self._watch)
        return ticket not in self._open

    def failure(self) -> Failure | None:
        return self._failures.failure

    def fail(self, kind: FailureKind, rank: int) -> None:
        self._failures.fail(Failed(kind, rank))

    def record(self, rank: int) -> RankRecord | None:
        return self._status.state().record if rank == self.rank else None

    def call(self, rank: int, number: int) -> Call | None:
        return self._status.state().calls.get(number) if rank == self.rank else None

    def message(self, rank: int) -> Call | None:
        return self._status.message if rank == self.rank else None

    def tell(self, call: Call | None) -> None:
        self._status.message = call

    def survey(self) -> Observed:
        failure = self._failures.failure
        lost = failure.rank if failure and failure.kind is FailureKind.LOST else -1
        return self._status.survey(failed=failure is not None, lost=lost)

    def sent_bytes(self) -> int:
        return self._sent

    def close(self) -> None:
        threads.complete(self._stop)

    def end(self) -> None:
        """See `Ending`."""
        C10dTransport.close(self)  # not a subclass's, which waits for a device
        if not self._forked:
            self._sending.until_sent(timedelta(seconds=threads.PATIENCE))
            cut(self._group)

    # --- on its threads

    def _spawn(self, act: Callable[[], None]) -> threading.Thread:
        return threads.spawn(partial(attempt, self._failures, act), "ringdp-c10d")

    def _run(self, ticket: int, ours: Stamped, run: Run, buffer: Tensor) -> None:
        if self._failures.failure is not None:
            return  # after a failure, no collective ends
        number = ours.call[0]

        def until(part: Work, row: Row) -> None:
            self._status.waits(row.round, row.recv_peer)
            self._until(part, row.recv_peer)

        rows = Rows(run.program, buffer, run.bounds, run.op)
        receiving = Receiving(self._group, run.program, rows, ours, buffer, self._talking, until)
        sends: list[tuple[Work, int, int]] = []
        self._moving = receiving.posted, sends
        receiving.post()
        bytes_sent = 0
        for at, row in enumerate(run.program):
            self._status.waits(row.round, row.recv_peer)
            try:
                sent = rows.run(at, receiving.value(at))
            except Unequal:
                raise Failed(FailureKind.MISMATCH, row.recv_peer) from None
            if sent is not None:
                to = row.send_peer
                with self._talking(to):
                    parts = wire.sends(self._group, sent, to, COLLECTIVE, number, ours.digest)
                    sends += [(part, to, row.round) for part in parts]
                bytes_sent += sent.nbytes
        rows.end()
        for part, peer, round_ in sends:
            self._status.waits(round_, peer)
            self._until(part, peer)
        self._moving = None
        self._status.end(number)
        self._end(ticket, bytes_sent)

    @contextmanager
    def _talking(self, peer: int) -> Iterator[None]:
        """Turn an error in the block into the loss of `peer`, or of some rank if it is -1."""
        try:
            yield
        except RuntimeError as e:
            raise Failed(FailureKind.LOST, peer) from e

    def _until(self, part: Work, peer: int) -> None:
        with self._failures.waits_for(peer), self._talking(peer):
            part.wait(wire.LONG)

    def _watch(self) -> None:
        """Watch the connections of all ranks from now on. A receive notices only its own sender's
        death."""
        with suppress(KeyError):
            while True:
                self._look_after_rank(self._unwatched.pop())

    def _look_after_rank(self, rank: int) -> None:
        self._spawn(partial(watch_for_end, self._group, self._failures, rank))

    def _busy(self) -> bool:
        return bool(self._open)

    def _end(self, ticket: int, sent: int = 0) -> None:
        with self._failures.lock:
            self._sent += sent
            self._open.pop(ticket, None)
        self._failures.changed.ring()


def attempt(failures: Failures, act: Callable[[], None]) -> None:
    """Run `act`; report an error in it as a failure of the communicator, on all ranks."""
    try:
        act()
    except Failed as e:
        failures.fail(e)
    except BaseException as e:
        why = f"{type(e).__name__}: {e}".partition("\n")[0]
        # Or the others wait for ever.
        failures.fail(Failed(FailureKind.ABORTED, failures.rank, why=why))
        raise
