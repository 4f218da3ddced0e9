"""The interface of every transport, which says HOW a program is executed, and its shared types.

A transport runs one rank's program on a flat buffer, in place. Sizes and dtypes enter here, so
programs do not depend on them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from enum import Enum
from typing import Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from ringdp._core import Ready
from ringdp.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicationError,
    PeerLost,
    UsageError,
)
from ringdp.schedule.program import Program
from ringdp.transport.arena import Arena
from ringdp.transport.bounds import Bounds
from ringdp.transport.records import Call, Observed
from ringdp.transport.tape import Tape

Op = Literal["sum", "prod", "min", "max", "band", "bor", "bxor"]  # the last three: not for floats
OPS: tuple[Op, ...] = get_args(Op)
ReduceOp = Literal[Op, "avg"]  # `Run` says what "avg" means to a program
REDUCE_OPS: tuple[ReduceOp, ...] = (*OPS, "avg")

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,  # sum, max and bor are "or"; prod, min and band are "and"
    torch.int16,
)


# The collectives that an `Exchange` can run, in csrc's order.
Direct = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
DIRECT: tuple[Direct, ...] = get_args(Direct)
# Exchanges whose end is delayed over an emulated link: see Note [held back] in csrc/link.hpp.
HELD_BACK = ("all_reduce", "reduce_scatter", "all_gather")


class FailureKind(Enum):
    """Why a program did not finish (csrc's enum Failure)."""

    LOST = 1
    TIMEOUT = 2
    MISMATCH = 3
    STOPPED = 4
    ABORTED = 5
    DAMAGED = 6


ERRORS: dict[FailureKind, type[CommunicationError]] = {
    FailureKind.LOST: PeerLost,
    FailureKind.ABORTED: PeerLost,
    FailureKind.TIMEOUT: CollectiveTimeout,
    FailureKind.MISMATCH: CollectiveMismatch,
    FailureKind.STOPPED: CommunicationError,
    FailureKind.DAMAGED: CommunicationError,
}

MESSAGE = (1 << 64) - 1  # stands for the collective's number in the stamp of a send or recv
Stamp = tuple[int, int, int]  # of a message: its collective's number and digest, its bytes
STAMP_BYTES = 3 * 8
NOTHING: Stamp = (0, 0, 0)


class Stamped(NamedTuple):
    """A call, with a `digest` of what all ranks must agree on in it and in all before it."""

    call: Call
    digest: int

    @property
    def stamp(self) -> Stamp:
        """What ranks compare before a collective whose messages carry only data."""
        number, _, elements, _ = self.call
        return number, self.digest, elements


class Failure(NamedTuple):
    """Why this communicator failed.

    `rank` is the rank at fault, or the one that gave up if this is a timeout or an abort.
    `reporter` is the rank that found the failure. `expected` and `found` are the stamps of a
    mismatched message, or zeros if no message revealed the failure.
    """

    kind: FailureKind
    rank: int
    reporter: int
    expected: Stamp = NOTHING
    found: Stamp = NOTHING
    why: str = ""  # the error text of the library that failed

    @property
    def cause(self) -> str:
        """What happened, for an error's text."""
        match self.kind:
            case FailureKind.LOST:
                return f"rank {self.rank} has ended"
            case FailureKind.ABORTED:
                return f"rank {self.rank} has aborted" + f" ({self.why})" * bool(self.why)
            case FailureKind.TIMEOUT:
                return f"rank {self.rank} gave up waiting"
            case FailureKind.MISMATCH:
                return f"rank {self.rank} made another call"
            case FailureKind.STOPPED:
                return "its communicator was closed"
            case FailureKind.DAMAGED:
                return "what the ranks tell one another is damaged"


class Link(NamedTuple):
    """A network that a host transport emulates by delivering messages late, one port per rank.

    `latency`, in s per message, is α of the cost model, and `bandwidth`, in bytes/s, is 1/β. What a
    rank sends to one peer in one round of a collective occupies its port for the latency plus the
    time of its bytes. Copying messages in and out takes CPU time of the ranks. A direct collective
    of HELD_BACK has no such copies: it runs as it does without a link, but ends late.
    """

    latency: float
    bandwidth: float


class Run(NamedTuple):
    """A program to run in place on a buffer whose chunks have these bounds.

    With `op` "avg" the transport sums. It divides sums of 16-bit floats before it rounds them, so
    the program must round complete sums only; the caller divides all other dtypes.

    Two ranks must agree on the lengths of the chunks that they exchange, and on no others.
    """

    program: Program
    bounds: Bounds
    dtype: torch.dtype
    op: ReduceOp
    kind: int
    elements: int  # of the collective, for its record
    uneven: bool = False  # whether `elements` may differ between ranks


class Exchange(NamedTuple):
    """A collective to run by the transport's own algorithm. `shards`: their bounds in `whole`."""

    collective: Direct
    shards: Bounds
    dtype: torch.dtype
    op: ReduceOp
    kind: int
    root: int | None = None  # the only receiver of an all_gather, or sender of an all_to_all
    received: Bounds = ()  # of the parts of an all_to_all_v's output; `shards` are those it sends

    @property
    def elements(self) -> int:
        return self.shards[-1]


class Prepared(Protocol):
    """A collective of fixed kind, length and dtype, to be started on 1-D contiguous buffers.

    A program has one buffer, `whole`. In an exchange, `part` is the input of an all_gather, None
    for an all_reduce, and otherwise the output; an all_to_all's output holds one piece from every
    sending rank, each as long as this rank's shard. `whole` is None if this rank has none.

    The transport keeps the buffers of collectives and messages alive until they end: the caller
    may return first, and after Ctrl-C it may never see the ticket.
    Starting a collective assigns its number atomically with respect to Ctrl-C. Every message
    carries the number and a digest of this call and all earlier ones; a receiver that expects
    others fails (MISMATCH). After a failure, found here or reported by another rank, no
    collective ends any more.
    """

    def start(self, whole: Tensor | None, part: Tensor | None, site: bytes, /) -> int:
        """Start it in the background. Returns a ticket for `wait`."""
        ...

    def run(self, whole: Tensor | None, part: Tensor | None, site: bytes, /) -> int:
        """Start it and work on it for a while. Returns 0 if it has ended, else a ticket."""
        ...


class Issued:
    """A `Prepared` for transports that prepare nothing: it issues every start anew."""

    def __init__(
        self,
        transport: Transport,
        what: Run | Exchange,
        issue: Callable[[Call, Tensor | None, Tensor | None], int],
    ) -> None:
        """`issue` starts a call on its buffers, whole and part, and returns a ticket."""
        self._transport, self._what, self._issue = transport, what, issue

    def start(self, whole: Tensor | None, part: Tensor | None, site: bytes, /) -> int:
        call = self._transport.issued, self._what.kind, self._what.elements, site
        return self._issue(call, whole, part)

    run = start


class Transport(Observed, Protocol):
    """Runs prepared collectives one after the other, in the order in which they are started."""

    rank: int
    device: torch.device  # of the tensors that it moves best
    # Slots of a channel, an upper bound on what a program needs (`schedule.fifo_depth`). None: it
    # runs a round at a time, and takes programs as `project` makes them, unfused.
    depth: float | None
    # Seconds that a collective may last from its start. The waiting caller enforces it, or the
    # transport, where collectives progress without a waiting caller.
    timeout: float = math.inf
    own: str | None = None  # the algorithm of its exchanges, if any; over a `link`, only HELD_BACK
    link: Link | None = None  # the network that it emulates
    ready: Ready | None = None  # what makes repeated calls fast (csrc/ready.hpp)
    tape: Tape | None = None  # what records its work while it is traced
    arena: Arena | None = None
    _process: int  # that made it

    @property
    def issued(self) -> int:
        """How many collectives have been started, which is the number of the next."""
        ...

    def prepare(self, what: Run | Exchange) -> Prepared:
        """Prepare a program, or an exchange by the algorithm `own`.

        A direct exchange has the bits of the `direct` program; an average of 16-bit floats is
        rounded once.
        """
        ...

    def check(self, buffer: Tensor) -> None:
        """Raises UsageError if this transport cannot move the tensor, or in a forked process."""
        if not buffer.is_cpu:
            raise UsageError(
                f"this communicator moves CPU tensors; this one is on {buffer.device}; allowed: "
                "tensor.cpu(), or for GPUs a communicator of ringdp.init(transport='nccl')"
            )
        self._check_process()

    def send(self, buffer: Tensor, to: int, kind: int, *, background: bool) -> int:
        """Send `buffer` (1-D, contiguous). Returns a ticket for `wait`.

        It may block until the receiver arrives, which must expect the same number of bytes and the
        same `kind` (else MISMATCH). Bits 24 and up of `kind` are a tag; messages between two ranks
        under one tag arrive in order.
        """
        ...

    def receive(
        self, buffer: Tensor, sender: int | None, kind: int, source: Tensor, *, background: bool
    ) -> int:
        """Receive a message from `sender`, or from any rank if None. Returns a ticket for `wait`.

        `source` is one int64, which is set to the sender's rank.
        """
        ...

    def release(self) -> None:
        """Release the buffers of what has ended, if the transport keeps them itself."""
        return

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor in the memory that this transport moves best."""
        ...

    def wait(self, ticket: int, timeout: float) -> bool:
        """Return whether that program or message ended within `timeout` seconds; False soon after
        a failure."""
        ...

    def failure(self) -> Failure | None: ...

    def fail(self, kind: FailureKind, rank: int) -> None:
        """Report to all ranks that `rank` is at fault, or that this rank (`rank`) gives up."""
        ...

    def survey(self) -> Observed:
        """Return what all ranks are doing, as far as it can be found out, in up to half a second.

        The transport's own `record`, `call` and `message` are immediate, and None for a rank that
        would have to be asked.
        """
        ...

    def tell(self, call: Call | None) -> None:
        """Publish the send or recv that this rank waits for; None: it no longer waits."""
        ...

    def sent_bytes(self) -> int:
        """Return the payload bytes sent to other ranks so far."""
        ...

    def await_device(self) -> None:
        """Wait until the device, if any, has finished all issued work, or something has failed."""
        return

    def close(self) -> None: ...

    @property
    def _forked(self) -> bool:
        """Whether this is a forked child, which has neither the threads nor the connections."""
        return os.getpid() != self._process

    def _check_process(self) -> None:
        if os.getpid() != self._process:  # not `_forked`: 0.1 µs
            raise UsageError(
                f"this communicator belongs to process {self._process}; process {os.getpid()}, "
                "forked from it, cannot use it"
            )
