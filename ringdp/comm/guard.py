"""What a failed collective says: who is missing, in which collective and round.

Every message carries its collective's number and `kind`, a small code of what it is. The receiver
compares them with its own, so ranks that disagree learn it from the first message.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn, get_args

from torch import dtype

from ringdp.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicationError,
    PeerLost,
    UsageError,
)
from ringdp.schedule import Collective
from ringdp.transport.base import (
    DTYPES,
    OPS,
    Failure,
    FailureKind,
    Op,
    Progress,
    Stamp,
    Transport,
)

TAGS = 1 << 39  # how many there are: with the codes below them they fit 63 bits
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)


class Call(NamedTuple):
    """One call of a collective: the number-th of its communicator."""

    number: int
    collective: Collective
    dtype: dtype
    op: Op
    elements: int
    tag: int

    @property
    def kind(self) -> int:
        codes = COLLECTIVES.index(self.collective), DTYPES.index(self.dtype), OPS.index(self.op)
        return self.tag << 24 | codes[0] << 16 | codes[1] << 8 | codes[2]

    def __str__(self) -> str:
        return f"{describe((self.number, self.kind, 0))} of {self.elements} elements"


def describe(stamp: Stamp) -> str:
    """`all_reduce #12 (float32, sum, tag 0)`."""
    number, kind, _ = stamp
    tag, collective = kind >> 24, COLLECTIVES[kind >> 16 & 0xFF]
    dtype_, op = DTYPES[kind >> 8 & 0xFF], OPS[kind & 0xFF]
    return f"{collective} #{number} ({str(dtype_).removeprefix('torch.')}, {op}, tag {tag})"


class Guard:
    """Turns a transport's failures into errors that name the rank, the collective and the round."""

    def __init__(self, transport: Transport, timeout: float) -> None:
        self.transport, self.timeout = transport, timeout
        self.error: CommunicationError | None = None

    def check(self, call: Call) -> None:
        """Raise if the transport has failed."""
        if self.error is None and (failure := self.transport.failure()):
            self.error = self._error(call, failure)
        if self.error is not None:
            raise self.error

    def give_up(self, call: Call, waited: float) -> NoReturn:
        """Tell the other ranks, and raise CollectiveTimeout."""
        self.transport.fail(FailureKind.TIMEOUT)
        self.error = CollectiveTimeout(f"{self._here(call)} for {waited:g} s\n{self._table()}")
        raise self.error

    def _error(self, call: Call, failure: Failure) -> CommunicationError:
        here, who = self._here(call), f"rank {failure.rank}"
        match failure.kind:
            case FailureKind.STOPPED:
                return CommunicationError(f"{here}, but its communicator was closed")
            case FailureKind.MISMATCH if failure.reported:
                text = f"{who} is at odds with another rank"
            case FailureKind.MISMATCH:
                found, expected = _sized(failure.found), _sized(failure.expected)
                text = f"{who} is in {found}, this rank expects {expected}"
            case FailureKind.LOST:
                text = f"{who} has ended"
            case FailureKind.TIMEOUT:
                text = f"{who} gave up waiting"
        kind = {
            FailureKind.LOST: PeerLost,
            FailureKind.TIMEOUT: CollectiveTimeout,
            FailureKind.MISMATCH: CollectiveMismatch,
        }[failure.kind]
        return kind(f"{here}: {text}\n{self._table()}")

    def _here(self, call: Call) -> str:
        number, round_, peer = self.transport.position()
        where = f", which is in #{number}" if number != call.number else ""
        where += f", round {round_}" if round_ >= 0 else ""
        where += f", waiting for rank {peer}" if peer >= 0 else ""
        return f"rank {self.transport.rank} waited for {call}{where}"

    def _table(self) -> str:
        rows = [f"  rank {r}: {_begun(p)}" for r, p in enumerate(self.transport.progress())]
        return "\n".join(["collectives begun last:", *rows])


def _begun(progress: Progress | None) -> str:
    if progress is None:
        return "none"
    return f"{describe((progress.number, progress.kind, 0))} of {progress.elements} elements"


def _sized(stamp: Stamp) -> str:
    try:
        return f"{describe(stamp)}, a message of {stamp[2]} bytes"
    except IndexError:
        return f"an unknown collective #{stamp[0]}"


def supported(given: dtype) -> None:
    """Raise UsageError for a dtype that collectives don't take."""
    if given not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise UsageError(f"collectives take {names}; this tensor is {given}")
