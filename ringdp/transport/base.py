"""HOW a program is executed: what every transport does, and what they share.

A transport runs one rank's program on a flat buffer, in place. It is told sizes and dtypes here,
so that programs need not know them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from ringdp._core import Ready
from ringdp.schedule.program import Program
from ringdp.transport.arena import Arena
from ringdp.transport.bounds import Bounds
from ringdp.transport.records import Call, Observed
from ringdp.transport.tape import Tape

Op = Literal["sum", "prod", "min", "max", "band", "bor", "bxor"]  # the last three: no floats
OPS: tuple[Op, ...] = get_args(Op)
ReduceOp = Literal[Op, "avg"]  # what users say; of rows, see `Run`
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


# What an `Exchange` may be, in csrc's order.
Direct = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
DIRECT: tuple[Direct, ...] = get_args(Direct)
HELD_BACK = ("all_reduce", "reduce_scatter", "all_gather")  # over a link: see csrc/link.hpp


class FailureKind(Enum):
    """Why a program did not end (csrc's enum Failure)."""

    LOST = 1
    TIMEOUT = 2
    MISMATCH = 3
    STOPPED = 4
    ABORTED = 5
    DAMAGED = 6


MESSAGE = (1 << 64) - 1  # for a number: of a message between two ranks
Stamp = tuple[int, int, int]  # of a message: number and digest of its collective, its bytes
NOTHING: Stamp = (0, 0, 0)


class Failure(NamedTuple):
    """`rank` is the one at fault, or for a timeout or an abort the one that gave up.

    `reporter` is the rank that found it. The stamps are those of a message that is none of ours,
    zeros where no message told of the failure.
    """

    kind: FailureKind
    rank: int
    reporter: int
    expected: Stamp = NOTHING
    found: Stamp = NOTHING
    why: str = ""  # in the words of the library that failed


class Link(NamedTuple):
    """A network that a host transport emulates: messages arrive late, over one port a rank.

    The cost model's α and 1/β: what a rank sends another in one round of a collective takes its
    port for `latency` and for its bytes. Copies into and out of messages take the ranks' cores; a
    direct one of HELD_BACK makes none: but for its end, which is late, it is that without a link.
    """

    latency: float  # s a message
    bandwidth: float  # bytes/s


class Run(NamedTuple):
    """A program, in place on a buffer with those bounds of chunks.

    An `op` of "avg" is the sum, but what is rounded, sums of 16-bit floats, is divided before: for
    programs that round whole sums only. Whoever asks divides the others.

    Two ranks must agree on the lengths of the chunks that one sends the other, and on no others.
    """

    program: Program
    bounds: Bounds
    dtype: torch.dtype
    op: ReduceOp
    kind: int
    elements: int  # of the collective, for those who look on


class Exchange(NamedTuple):
    """A collective in the transport's own way. `shards`: bounds, in the whole."""

    collective: Direct
    shards: Bounds
    dtype: torch.dtype
    op: ReduceOp
    kind: int
    root: int | None = None  # the only one to receive an all_gather, or to send in an all_to_all


class Prepared(Protocol):
    """A collective of one kind, length and dtype, on buffers (1-D, contiguous) that it keeps alive.

    A program has one buffer, `whole`. Else `part` is the input of an all_gather, None in an
    all_reduce, else the output: of an all_to_all, a piece from every rank that sends, each as long
    as this rank's shard; and `whole` is None where this rank has none.

    What it, and messages, use is kept alive until they have ended: the caller may be gone by then,
    and where Ctrl-C comes it may never see the ticket.
    What is begun gets a number, in one step: Ctrl-C comes before or after it. The number, and a
    digest of the call's kind and of all before, go with every message: a receiver that expects
    others fails (MISMATCH). After a failure, of this rank or reported by another, none ends any
    more.
    """

    def start(self, whole: Tensor | None, part: Tensor | None, site: bytes, /) -> int:
        """Begin it in the background. Returns a ticket for `wait`."""
        ...

    def run(self, whole: Tensor | None, part: Tensor | None, site: bytes, /) -> int:
        """Begin it and work on it for a while. Returns 0 if it has ended, else a ticket."""
        ...


# A call and its buffers, whole and part; returns a ticket.
Issue = Callable[[Call, Tensor | None, Tensor | None], int]


class Issued:
    """`Prepared` where nothing can be: every start is issued anew."""

    def __init__(self, transport: Transport, issue: Issue, kind: int, elements: int) -> None:
        self._transport, self._issue, self._kind, self._elements = transport, issue, kind, elements

    def start(self, whole: Tensor | None, part: Tensor | None, site: bytes, /) -> int:
        call = self._transport.issued, self._kind, self._elements, site
        return self._issue(call, whole, part)

    run = start


class Transport(Observed, Protocol):
    """Runs what it has prepared one after the other, in the order in which that is started."""

    @property
    def rank(self) -> int: ...

    @property
    def device(self) -> torch.device:
        """Where the tensors are that it moves best."""
        ...

    @property
    def link(self) -> Link | None:
        """The network that it emulates."""
        ...

    @property
    def tape(self) -> Tape | None:
        """Where it keeps what it does while it is traced; None where it does not."""
        ...

    @property
    def depth(self) -> float | None:
        """Slots of a channel: a program must need no more (`schedule.fifo_depth`). None: it runs a
        round at a time, and wants programs as `project` makes them."""
        ...

    @property
    def issued(self) -> int:
        """How many collectives have been begun: the number of the next."""
        ...

    def prepare(self, what: Run | Exchange) -> Prepared:
        """An exchange is by the algorithm `own`: that of `direct` has the bits of its program, and
        where it averages 16-bit floats, those of one rounding."""
        ...

    timeout: float
    """Seconds that a collective may last from its start. Who waits for it counts them; the
    transport where it goes on when nobody does."""

    def check(self, buffer: Tensor) -> None:
        """Raise UsageError for a tensor that this transport does not move."""
        ...

    @property
    def own(self) -> str | None:
        """The algorithm of its exchanges, if there are any; over a `link` those of HELD_BACK."""
        ...

    @property
    def ready(self) -> Ready | None:
        """The calls that have been made before, for a second one to be short (csrc/ready.hpp); None
        where there are none to be remembered."""
        ...

    def send(self, buffer: Tensor, to: int, kind: int, *, background: bool) -> int:
        """Send `buffer` (1-D, contiguous), and return a ticket for `wait`.

        It may wait for the receiver, who must expect as many bytes of that `kind` (or: MISMATCH),
        whose bits from 24 on are a tag: of what one rank sends another under one tag, the first
        sent is the first received.
        """
        ...

    def receive(
        self, buffer: Tensor, sender: int | None, kind: int, source: Tensor, *, background: bool
    ) -> int:
        """The same for a message from `sender`, None: from anybody. `source`: one int64 that will
        be who sent it."""
        ...

    def release(self) -> None:
        """Keep no longer what has ended has used."""
        ...

    @property
    def arena(self) -> Arena | None: ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor in memory that this transport moves best."""
        ...

    def wait(self, ticket: int, timeout: float) -> bool:
        """Whether that program ended within `timeout` seconds; False soon after a failure."""
        ...

    def failure(self) -> Failure | None: ...

    def fail(self, kind: FailureKind, rank: int) -> None:
        """Tell the other ranks that `rank` is at fault, or that it gives up."""
        ...

    def survey(self) -> Observed:
        """What all ranks do, as far as it can be found out; it may take half a second. What the
        transport itself says of a rank costs nothing, and is None where it would have to ask."""
        ...

    def tell(self, call: Call | None) -> None:
        """Let all see that this rank waits for a send or recv; None: no more."""
        ...

    def sent_bytes(self) -> int:
        """Payload bytes sent to other ranks so far."""
        ...

    def await_device(self) -> None:
        """Return once a device has done all that was issued there, or something has failed."""
        ...

    def close(self) -> None: ...
