"""What a rank of a contender is to its worker, and what worker and controller say to each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ringdp.cli.bench.cases import Task, torch_dtype


class Buffers(NamedTuple):
    input: Tensor
    output: Tensor  # the input itself where the collective works in place


class Contender(ABC):
    """One library, as one of its ranks sees it."""

    rank: int
    ranks: int
    version: str
    device = "cpu"

    def input(self, task: Task, count: int) -> Tensor:
        """Room for so many elements."""
        return torch.empty(count, dtype=torch_dtype(task.dtype), device=self.device)

    @abstractmethod
    def call(self, task: Task, buffers: Buffers) -> Callable[[], object]:
        """What is timed: one call as users write it, which on a GPU may end later."""

    @abstractmethod
    def barrier(self) -> object: ...

    @abstractmethod
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
