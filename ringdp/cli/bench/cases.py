"""Each collective's buffers, correct results and least traffic: one row of CASES each.

Sizes are defined as in nccl-tests: `count` elements, or S bytes, are the larger of a rank's two
buffers, so all_gather takes count/n elements and gives count. busbw = algbw × `bus`, where `bus` is
the share of S that every rank must send, so busbw compares with a link's speed. The root is rank 0.

In the `_v` forms rank r's part is r + 1 times as large as rank 0's. In all_to_all_v each rank cuts
its input so for the ranks from itself on, so every rank also receives S. `bus` is then the share
that the busiest rank must send or receive: all but the smallest part.

In `send` a message goes round all ranks, from rank 0, each of which sends its own S on when it has
received the one before. Its time is that of one message, 1/n of the lap: on 2 ranks half the round
trip, as in the OSU benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


@dataclass(frozen=True)
class Task:
    """One thing to measure, as sent to every rank of a contender."""

    collective: str
    algorithm: str  # ringdp's; "auto" leaves the choice to the communicator
    registered: bool
    dtype: str
    op: str
    count: int  # elements

    @property
    def size(self) -> int:
        """S in bytes."""
        return self.count * itemsize(self.dtype)

    @property
    def label(self) -> str:
        return self.algorithm + (" reg" if self.registered else "")


class Moves(NamedTuple):
    """Shares of S that the busiest rank must move, by the passes of `bound`."""

    folded: float = 0.0
    read: float = 0.0
    pulled: float = 0.0
    copied: float = 0.0


Inputs = Callable[[int], Tensor]  # rank -> its input
Elements = Callable[[int, int, int], int]  # (count, n, rank) -> elements of one of its buffers
Parts = Callable[[int], Sequence[int]]  # n -> the ranks' parts, in units
Result = Callable[[Inputs, int, int, str], Tensor | None]  # (inputs, rank, n, op) -> its output


class Case(NamedTuple):
    takes: Elements  # a rank's input
    gives: Elements | None  # its output; None: the input becomes it
    bus: Callable[[int], float]
    moves: Callable[[int, bool], Moves]  # (n, whether the input is in shared memory)
    result: Result  # None if a rank gets nothing
    reduces: bool = False
    parts: Parts | None = None  # that a buffer is cut into
    lap: bool = False  # a call is n messages, one after the other, and the time is that of one

    def units(self, n: int) -> int:
        """What the count is a multiple of."""
        return sum(self.parts(n)) if self.parts else 1


def even(n: int) -> Sequence[int]:
    return [1] * n


def uneven(n: int) -> Sequence[int]:
    return range(1, n + 1)


def part_sizes(count: int, parts: Sequence[int], first: int = 0) -> list[int]:
    """The elements of the parts of `count`, if the first part is for rank `first`."""
    found = [count * part // sum(parts) for part in parts]
    return found[-first:] + found[:-first]


def exchanged(count: int, n: int, rank: int) -> tuple[list[int], list[int]]:
    """How much a rank receives from each rank in an all_to_all_v, and how much it sends."""
    sent = [part_sizes(count, uneven(n), q) for q in range(n)]
    return [s[rank] for s in sent], sent[rank]


def whole(count: int, n: int, rank: int) -> int:
    return count


def all_of(n: int) -> float:
    return 1.0


def _folded(inputs: Inputs, n: int, op: str) -> Tensor:
    return reduce(FOLDS[op], (inputs(q) for q in range(n)))


def _joined(inputs: Inputs, n: int) -> Tensor:
    return torch.cat([inputs(q) for q in range(n)])


def _folding(n: int, registered: bool) -> Moves:
    """Every rank folds its n-th part of all inputs.

    It can write the result into registered buffers itself. A private buffer is written by its
    owner, which pulls the parts that others have folded.
    """
    pulled = 0.0 if registered else (n - 1) / n
    return Moves(folded=1 / n, read=(n - 2) / n, pulled=pulled)


def _in_parts(parts: Parts) -> dict[str, Case]:
    """The collectives of which a buffer has a part for each rank. Rank 0's part is a smallest."""

    def part(count: int, n: int, rank: int) -> int:
        return part_sizes(count, parts(n))[rank]

    def own(n: int, rank: int = 0) -> float:
        return parts(n)[rank] / sum(parts(n))

    def others(n: int) -> float:
        return sum(parts(n)[1:]) / sum(parts(n))

    def collecting(n: int, registered: bool) -> Moves:
        return Moves(pulled=others(n), copied=own(n))

    def cut(buffer: Tensor, n: int, first: int = 0) -> Sequence[Tensor]:
        return torch.split(buffer, part_sizes(len(buffer), parts(n), first))

    case = partial(Case, bus=others, parts=parts)
    return {
        "reduce_scatter": case(
            takes=whole,
            gives=part,
            moves=lambda n, registered: Moves(read=(n - 2) * own(n, -1), pulled=own(n, -1)),
            result=lambda inputs, rank, n, op: cut(_folded(inputs, n, op), n)[rank],
            reduces=True,
        ),
        "all_gather": case(
            takes=part,
            gives=whole,
            moves=collecting,
            result=lambda inputs, rank, n, op: _joined(inputs, n),
        ),
        "gather": case(
            takes=part,
            gives=whole,
            moves=collecting,
            result=lambda inputs, rank, n, op: None if rank else _joined(inputs, n),
        ),
        "scatter": case(
            takes=whole,
            gives=part,
            moves=lambda n, registered: Moves(pulled=own(n, -1)),
            result=lambda inputs, rank, n, op: cut(inputs(0), n)[rank],
        ),
        "all_to_all": case(
            takes=whole,
            gives=whole,
            moves=collecting,
            result=lambda inputs, rank, n, op: torch.cat(
                [cut(inputs(q), n, q)[rank] for q in range(n)]
            ),
        ),
    }


EVEN: dict[str, Case] = {
    "all_reduce": Case(
        takes=whole,
        gives=None,
        bus=lambda n: 2 * (n - 1) / n,
        moves=_folding,
        result=lambda inputs, rank, n, op: _folded(inputs, n, op),
        reduces=True,
    ),
    "broadcast": Case(
        takes=whole,
        gives=None,
        bus=all_of,
        moves=lambda n, registered: Moves(pulled=1.0),
        result=lambda inputs, rank, n, op: inputs(0),
    ),
    "reduce": Case(
        takes=whole,
        gives=None,
        bus=all_of,
        moves=_folding,
        result=lambda inputs, rank, n, op: None if rank else _folded(inputs, n, op),
        reduces=True,
    ),
    **_in_parts(even),
}
UNEVEN = {f"{name}_v": case for name, case in _in_parts(uneven).items()}
LAP = Case(
    takes=whole,
    gives=whole,
    bus=all_of,
    moves=lambda n, registered: Moves(pulled=1.0),
    result=lambda inputs, rank, n, op: inputs((rank - 1) % n),
    lap=True,
)
CASES = EVEN | UNEVEN | {"send": LAP}


def _part_folded(inputs: Inputs, rank: int, n: int, op: str) -> Tensor:
    """Rank r adds its peer's r-th part to its own, so no rank writes what another reads."""
    found = inputs(rank).clone()
    found.tensor_split(n)[rank].add_(inputs((rank + 1) % n).tensor_split(n)[rank])
    return found


def _probe(gives: Elements | None, share: Callable[[int], float], result: Result) -> Case:
    return Case(whole, gives, share, lambda n, registered: Moves(), result, parts=even)


# The passes of `bound`, measured like collectives; `bus` is the share of S that they process.
PROBES: dict[str, Case] = {
    "fold": _probe(None, lambda n: 1 / n, _part_folded),
    "read": _probe(None, all_of, lambda inputs, rank, n, op: None),
    "pull": _probe(whole, all_of, lambda inputs, rank, n, op: inputs((rank + 1) % n)),
    "copy": _probe(whole, all_of, lambda inputs, rank, n, op: inputs(rank)),
}
EVERY = CASES | PROBES


def elements(case: Case, dtype: str, size: int, n: int) -> int:
    """Elements in `size` bytes, rounded down to whole units of the ranks' parts."""
    units = case.units(n)
    return size // itemsize(dtype) // units * units


def itemsize(dtype: str) -> int:
    return torch_dtype(dtype).itemsize


def torch_dtype(dtype: str) -> torch.dtype:
    found = getattr(torch, dtype)
    assert isinstance(found, torch.dtype)
    return found


# ---- inputs with exactly known results: sums of ones and twos are exact in every dtype


def pattern(rank: int, count: int, dtype: str) -> Tensor:
    """An input that differs by place and by rank."""
    random = torch.Generator().manual_seed(rank)
    return torch.randint(1, 3, (count,), dtype=torch.uint8, generator=random).to(torch_dtype(dtype))


def constant(rank: int, call: int) -> int:
    """The fill value of a rank's input before a timed call: 2 if bit rank % 4 of `call` is set."""
    return 1 + (call >> rank % 4 & 1)


def wrong_pattern(case: Case, output: Tensor, task: Task, rank: int, n: int) -> int:
    """The number of elements of `output` that are wrong for pattern inputs."""
    right = case.result(
        lambda q: pattern(q, case.takes(task.count, n, q), task.dtype), rank, n, task.op
    )
    return 0 if right is None else int((output != right).sum())


def wrong_constant(case: Case, output: Tensor, task: Task, call: int, rank: int, n: int) -> int:
    """The same for constant inputs. One element stands for each unit of a buffer."""
    units, dtype = case.units(n), torch_dtype(task.dtype)

    def small(q: int) -> Tensor:
        return torch.full((case.takes(units, n, q),), constant(q, call), dtype=dtype)

    right = case.result(small, rank, n, task.op)
    if right is None:
        return 0
    parts = zip(output.tensor_split(len(right)), right, strict=True)
    return sum(int((here != value).sum()) for here, value in parts)
