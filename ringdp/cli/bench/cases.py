"""Each collective's buffers, correct results and least traffic: one row of CASES each.

Sizes are defined as in nccl-tests: `count` elements, or S bytes, are the larger of a rank's two
buffers, so all_gather takes count/n elements and gives count. busbw = algbw × `bus`, where `bus` is
the share of S that every rank must send, so busbw compares with a link's speed. The root is rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
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
Elements = Callable[[int, int], int]  # (count, n) -> elements of one buffer
Result = Callable[[Inputs, int, int, str], Tensor | None]  # (inputs, rank, n, op) -> its output


class Case(NamedTuple):
    takes: Elements  # a rank's input
    gives: Elements | None  # its output; None: the input becomes it
    bus: Callable[[int], float]
    moves: Callable[[int, bool], Moves]  # (n, whether the input is in shared memory)
    result: Result  # None if a rank gets nothing
    reduces: bool = False


def whole(count: int, n: int) -> int:
    return count


def part(count: int, n: int) -> int:
    return count // n


def others(n: int) -> float:
    return (n - 1) / n


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
    pulled = 0.0 if registered else others(n)
    return Moves(folded=1 / n, read=(n - 2) / n, pulled=pulled)


def _collecting(n: int, registered: bool) -> Moves:
    return Moves(pulled=others(n), copied=1 / n)


CASES: dict[str, Case] = {
    "all_reduce": Case(
        takes=whole,
        gives=None,
        bus=lambda n: 2 * others(n),
        moves=_folding,
        result=lambda inputs, rank, n, op: _folded(inputs, n, op),
        reduces=True,
    ),
    "reduce_scatter": Case(
        takes=whole,
        gives=part,
        bus=others,
        moves=lambda n, registered: Moves(read=(n - 2) / n, pulled=1 / n),
        result=lambda inputs, rank, n, op: _folded(inputs, n, op).chunk(n)[rank],
        reduces=True,
    ),
    "all_gather": Case(
        takes=part,
        gives=whole,
        bus=others,
        moves=_collecting,
        result=lambda inputs, rank, n, op: _joined(inputs, n),
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
    "gather": Case(
        takes=part,
        gives=whole,
        bus=others,
        moves=_collecting,
        result=lambda inputs, rank, n, op: None if rank else _joined(inputs, n),
    ),
    "scatter": Case(
        takes=whole,
        gives=part,
        bus=others,
        moves=lambda n, registered: Moves(pulled=1 / n),
        result=lambda inputs, rank, n, op: inputs(0).chunk(n)[rank],
    ),
    "all_to_all": Case(
        takes=whole,
        gives=whole,
        bus=others,
        moves=_collecting,
        result=lambda inputs, rank, n, op: torch.cat([inputs(q).chunk(n)[rank] for q in range(n)]),
    ),
}


def _part_folded(inputs: Inputs, rank: int, n: int, op: str) -> Tensor:
    """Rank r adds its peer's r-th part to its own, so no rank writes what another reads."""
    found = inputs(rank).clone()
    found.tensor_split(n)[rank].add_(inputs((rank + 1) % n).tensor_split(n)[rank])
    return found


def _probe(gives: Elements | None, share: Callable[[int], float], result: Result) -> Case:
    return Case(whole, gives, share, lambda n, registered: Moves(), result)


# The passes of `bound`, measured like collectives; `bus` is the share of S that they process.
PROBES: dict[str, Case] = {
    "fold": _probe(None, lambda n: 1 / n, _part_folded),
    "read": _probe(None, all_of, lambda inputs, rank, n, op: None),
    "pull": _probe(whole, all_of, lambda inputs, rank, n, op: inputs((rank + 1) % n)),
    "copy": _probe(whole, all_of, lambda inputs, rank, n, op: inputs(rank)),
}
EVERY = CASES | PROBES


def elements(case: Case, dtype: str, size: int, n: int) -> int:
    """Elements in `size` bytes, rounded down to a multiple of n if ranks own parts."""
    count = size // itemsize(dtype)
    in_parts = part in (case.takes, case.gives) or case is CASES["all_to_all"]
    return count // n * n if in_parts else count


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
    size = case.takes(task.count, n)
    right = case.result(lambda q: pattern(q, size, task.dtype), rank, n, task.op)
    return 0 if right is None else int((output != right).sum())


def wrong_constant(case: Case, output: Tensor, task: Task, call: int, rank: int, n: int) -> int:
    """The same for constant inputs. One element stands for each n-th part of a buffer."""
    small = case.takes(n, n)
    dtype = torch_dtype(task.dtype)
    right = case.result(
        lambda q: torch.full((small,), constant(q, call), dtype=dtype), rank, n, task.op
    )
    if right is None:
        return 0
    parts = zip(output.tensor_split(len(right)), right, strict=True)
    return sum(int((here != value).sum()) for here, value in parts)
