"""What a rank of a contender is to its worker, and what worker and controller say to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ringdp.cli.bench.cases import Case, Task, torch_dtype


class Buffers(NamedTuple):
    input: Tensor
    output: Tensor  # the input itself where the collective works in place


class Contender(Protocol):
    """One library, as one of its ranks sees it."""

    rank: int
    ranks: int
    version: str

    def buffers(self, task: Task, case: Case) -> Buffers: ...

    def call(self, task: Task, buffers: Buffers) -> Callable[[], object]:
        """What is timed: one call as users write it."""
        ...

    def barrier(self) -> None: ...

    def close(self) -> None: ...


class Hello(NamedTuple):
    rank: int
    pid: int
    version: str


class Round(NamedTuple):
    """`number` counts the rounds of a task; `calls` are timed."""

    task: Task
    number: int
    calls: int


class Times(NamedTuple):
    nanoseconds: list[int]  # of each timed call on this rank
    wrong: int  # elements


class Failure(NamedTuple):
    traceback: str


def plain_buffers(task: Task, case: Case, ranks: int, device: str = "cpu") -> Buffers:
    dtype = torch_dtype(task.dtype)
    taken = torch.empty(case.takes(task.count, ranks), dtype=dtype, device=device)
    if case.gives is None:
        return Buffers(taken, taken)
    given = torch.empty(case.gives(task.count, ranks), dtype=dtype, device=device)
    return Buffers(taken, given)
