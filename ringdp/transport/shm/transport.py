"""The transport over shared memory between the ranks of one host, the default without a GPU.

csrc runs the programs without the GIL, on the waiting thread or a progress thread. `files` says how
the ranks share memory, and why none is left behind.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import FileIO
from itertools import chain
from os import dup
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from ringdp import _core
from ringdp.errors import CommunicationError
from ringdp.transport import threads
from ringdp.transport.arena import Arena, arena_bytes
from ringdp.transport.base import (
    DIRECT,
    DTYPES,
    REDUCE_OPS,
    Exchange,
    Failure,
    FailureKind,
    Link,
    Prepared,
    Run,
    Transport,
)
from ringdp.transport.records import Call, Observed, RankRecord, read_record
from ringdp.transport.shm.files import (
    Address,
    advice,
    create,
    open_other,
    publish_address,
    read_address,
)
from ringdp.transport.shm.watch import NAME
from ringdp.transport.store.handshake import Handshake

IN_FLIGHT = 16  # slabs from one rank to all others, over a link
LEAST_DEPTH = 4  # slots of a FIFO


class ShmTransport(Transport):
    """One rank's end of the shared segment."""

    device = torch.device("cpu")
    own = "direct"
    ready: _core.Ready
    arena: Arena

    def __init__(
        self, handshake: Handshake, *, arena: Arena | None = None, link: Link | None = None
    ) -> None:
        """Collective: returns once all ranks have attached.

        `arena` is the arena of another transport over the same ranks, to share. `link` is a network
        to emulate.
        """
        self.rank, self.ranks, self.link = handshake.rank, handshake.ranks, link
        shape = fifo_shape(self.ranks, link)
        self.depth = shape.depth
        segment = self._attach(handshake, shape, arena)
        self._process = os.getpid()
        # Ticket -> the objects whose memory csrc uses; csrc adds them. A Work may be dropped early.
        self.kept: dict[int, Any] = {}
        self.messages: dict[int, Any] = {}  # the same for messages, whose tickets are negative
        # Runs at `close`, when the transport is collected, or at exit, whichever comes first.
        self._stop = weakref.finalize(
            self,
            _stop,
            *(self._mail, self._core, self.arena, self.kept, self.messages, self._process, segment),
        )
        self._closing = threading.RLock()  # a thread may end only once
        _all.add(self)
        threads.at_exit(self)

    def _attach(self, handshake: Handshake, shape: FifoShape, arena: Arena | None) -> FileIO:
        """Create or open the files and map them, on all ranks. Returns the open segment's file."""
        rank, ranks = self.rank, self.ranks
        with ExitStack() as until_attached:

            def owned(fd: int) -> int:
                until_attached.callback(os.close, fd)
                return fd

            if rank == 0:
                sizes = ranks, shape.slots, shape.slab
                files = [owned(create(NAME, _core.segment_size(*sizes), reserve=True))]
                mail = _core.mailbox_size(*sizes)
                files += [owned(create("ringdp-mail", mail, reserve=False))]
                if arena is None:
                    files += [owned(create("ringdp-arena", arena_bytes(ranks), reserve=False))]
                address = Address(os.getpid(), secrets.randbits(63), *files)
            else:
                address = read_address(handshake)
                pid, _, *fds = address
                files = [owned(open_other(pid, fd)) for fd in fds[: 3 if arena is None else 2]]
            self._map(files, address.token, shape, arena)
            if rank == 0:
                publish_address(handshake, address)
            handshake.barrier("attached")
            try:
                with _translated(rank):
                    self._core.connect()
                    return FileIO(dup(files[0]), "r+")
            except BaseException:  # the others have gone on without this rank
                self._core.fail(FailureKind.ABORTED.value, rank)
                raise

    def _map(self, files: list[int], token: int, shape: FifoShape, arena: Arena | None) -> None:
        with _translated(self.rank):
            self.arena = arena or Arena(files[2], self.rank, self.ranks)
            self._core = _core.Progress(
                files[0],
                self.rank,
                self.ranks,
                shape.slots,
                shape.slab,
                token,
                self.arena.address,
                self.arena.bytes,
                self.link.latency if self.link else 0.0,
                self.link.bandwidth if self.link else 0.0,
                shape.stride,
            )
            self.tape = self._core
            table = Tensor.__dlpack_c_exchange_api__  # see csrc/tensors.hpp
            self._mail = _core.Mailbox(self._core, files[1])
            types = Tensor, torch.nn.Parameter
            self.ready = _core.Ready(self.rank, self.ranks, table, *types, self._mail)

    @property
    def issued(self) -> int:
        return self._core.issued

    def prepare(self, what: Run | Exchange) -> Prepared:
        if isinstance(what, Exchange):
            return _core.Prepared.exchange(
                self._core,
                DIRECT.index(what.collective),
                -1 if what.root is None else what.root,
                what.shards,
                what.received,
                DTYPES.index(what.dtype),
                REDUCE_OPS.index(what.op),
                what.kind,
                self.kept,
            )
        program = what.program
        return _core.Prepared.program(
            self._core,
            program,
            program.rows.ctypes.data,
            len(program.rows),
            program.chunks,
            program.scratch,
            program.changes,
            what.bounds,
            DTYPES.index(what.dtype),
            REDUCE_OPS.index(what.op),
            what.kind,
            what.elements,
            self.kept,
        )

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self._check_process()  # a forked child would allocate the same memory as its parent
        return self.arena.empty(shape, dtype)

    def send(self, buffer: Tensor, to: int, kind: int, *, background: bool) -> int:
        self.check(buffer)
        self.release()
        at, size = buffer.data_ptr(), buffer.nbytes
        with _translated(self.rank):
            return self._mail.send(at, size, kind, to, background, self.messages, buffer)

    def receive(
        self, buffer: Tensor, sender: int | None, kind: int, source: Tensor, *, background: bool
    ) -> int:
        self.check(buffer)
        self.release()
        with _translated(self.rank):
            return self._mail.receive(
                buffer.data_ptr(),
                buffer.nbytes,
                kind,
                -1 if sender is None else sender,
                source.data_ptr(),
                background,
                self.messages,
                (buffer, source),
            )

    def wait(self, ticket: int, timeout: float) -> bool:
        self._check_process()
        if not (self._mail if ticket < 0 else self._core).wait(ticket, timeout):
            return False
        self.release()
        return True

    def failure(self) -> Failure | None:
        self._check_process()
        found = self._core.failed()
        if found is None:
            return None
        kind, rank, reporter, *_ = found
        reporter = self.rank if reporter < 0 else reporter
        kinds, ranks = [k.value for k in FailureKind], range(self.ranks)
        if kind not in kinds or rank not in ranks or reporter not in ranks:
            return Failure(FailureKind.DAMAGED, self.rank, self.rank)
        return Failure(FailureKind(kind), rank, reporter, found[3:6], found[6:9], found[9])

    def fail(self, kind: FailureKind, rank: int) -> None:
        self._check_process()
        self._core.fail(kind.value, rank)

    def survey(self) -> Observed:
        return self

    def record(self, rank: int) -> RankRecord | None:
        return None if self._forked else read_record(self._core, rank)

    def call(self, rank: int, number: int) -> Call | None:
        return None if self._forked or number < 0 else self._core.call(rank, number)

    def message(self, rank: int) -> Call | None:
        return None if self._forked else self._core.message(rank)

    def tell(self, call: Call | None) -> None:
        if self._forked:
            return  # it has not mapped the records
        if call is None:
            self._core.has_message()
        else:
            self._core.waits_for_message(*call)

    def sent_bytes(self) -> int:
        return int(self._core.sent_bytes())

    def close(self) -> None:
        self.ready.forget()
        with self._closing:
            threads.complete(self._stop)

    end = close  # see `Ending`

    def release(self) -> None:
        finished = self._core.finished()
        for ticket in list(self.kept):
            if ticket > finished:
                break  # collectives end in order
            self.kept.pop(ticket, None)
        for ticket in self._mail.ended():
            self.messages.pop(ticket, None)


class FifoShape(NamedTuple):
    """The size of each FIFO between two ranks."""

    depth: int  # slots that a program may need
    stride: int  # slabs of a chunk in flight at once; multiplies the slots
    slab: int  # bytes of a slot

    @property
    def slots(self) -> int:
        return self.depth * self.stride


def fifo_shape(ranks: int, link: Link | None) -> FifoShape:
    """Return the shape of the FIFOs of so many ranks.

    Slabs are small enough that a message of some hundred KiB pipelines. Fused rings need 2 slots,
    halving more; 16 slots exceed a core's cache, for the reason in Note [room] in
    csrc/exchange.hpp: a ring of 2 ranks took 590 µs for 4 MiB with 4 slots and takes 290 with 16.
    """
    slab = max(4 << 10, min(64 << 10, (512 << 10) // ranks) & -64)
    if link:
        return FifoShape(LEAST_DEPTH, max(1, IN_FLIGHT // ranks), slab)
    return FifoShape(max(LEAST_DEPTH, 32 // ranks), 1, slab)


@contextmanager
def _translated(rank: int) -> Iterator[None]:
    try:
        yield
    except CommunicationError:
        raise
    except (OSError, RuntimeError) as e:  # from csrc: a foreign header or size, or no memory
        raise CommunicationError(
            f"rank {rank} cannot use rank 0's shared memory: {e}{advice(e)}"
        ) from e


def _stop(
    mail: _core.Mailbox,
    core: _core.Progress,
    arena: Arena,
    kept: dict[int, Any],
    messages: dict[int, Any],
    process: int,
    segment: FileIO,
) -> None:
    segment.close()
    if os.getpid() == process:  # a forked child has neither the threads nor the memory
        mail.close()
        core.close()
        finished = core.finished()
        late = [used for ticket, used in list(kept.items()) if ticket > finished]
        arena.hold(chain.from_iterable(late), core.left_alone)
    kept.clear()
    messages.clear()


def _abandon_all() -> None:
    """Close all transports in a forked child, which has not mapped their memory.

    Closing their files frees the memory when the rank ends, even if the child outlives it.
    """
    for transport in list(_all):
        transport._closing = threading.RLock()  # a thread of the parent may hold it
        transport.close()
        _core.abandon(transport._mail, transport._core)  # even if it was closed before the fork


_all: WeakSet[ShmTransport] = WeakSet()
os.register_at_fork(after_in_child=_abandon_all)
