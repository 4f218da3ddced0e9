"""The interface of a contender's rank, and the messages between controller and worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ringdp.cli.bench.cases import Task, torch_dtype


class Buffers(NamedTuple):
    input: Tensor
    output: Tensor  # the input itself if the collective works in place


class Contender(ABC):
    """One library, as seen by one of its ranks."""

    rank: int
    ranks: int
    version: str
    device = "cpu"

    def input(self, task: Task, count: int) -> Tensor:
        """Allocate an input of `count` elements."""
        return torch.empty(count, dtype=torch_dtype(task.dtype), device=self.device)

    @abstractmethod
    def call(self, task: Task, buffers: Buffers) -> Callable[[], object]:
        """The call to time, as users write it. On a GPU it may return before it has finished."""

    @abstractmethod
    def barrier(self) -> object: ...

    @abstractmethod
    def close(self) -> None: ...


class Hello(NamedTuple):
    rank: int
    pid: int
    version: str


class Round(NamedTuple):
    """`number` counts the rounds of a task; `calls` is how many calls are timed."""

    task: Task
    number: int
    calls: int


class Times(NamedTuple):
    nanoseconds: list[int]  # of each timed call on this rank
    wrong: int  # elements


class Failure(NamedTuple):
    traceback: str
