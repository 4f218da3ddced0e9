"""Timing of sampled DDP iterations, in nanoseconds since the epoch, and the last error.

    forward_compute    from the start of forward to the first gradient
    backward_compute   from there to the end of autograd's work
    backward_comm      from the first bucket's start until all are reduced
    overlap            the part of backward_comm inside backward_compute

Sampled as by torch's DDP: the first ten iterations, then every hundredth, or at the rate set.
Errors are under the keys `has_error` and `error`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from time import time_ns
from typing import TypeVar

from ringdp.errors import UsageError

ALWAYS = 10  # iterations that are sampled before `rate` counts
BEGUN = "forward_compute_time_start"
GRADIENT, GRADIENTS = "backward_compute_time_start", "backward_compute_time_end"
REDUCING, REDUCED = "backward_comm_time_start", "backward_comm_time_end"
SPANS = {
    "forward_compute_time": (BEGUN, GRADIENT),
    "backward_compute_time": (GRADIENT, GRADIENTS),
    "backward_comm_time": (REDUCING, REDUCED),
    "backward_compute_comm_overlap_time": (REDUCING, GRADIENTS),
}

Error = TypeVar("Error", bound=Exception)


class RuntimeLog:
    """One DDP's log. `facts`: the last sampled or failed iteration, by torch's keys."""

    def __init__(self) -> None:
        self.facts: dict[str, int | str] = {}
        self._sampling = False  # in this iteration
        self._rate = 100
        self._iterations = self._samples = 0
        self._marks: dict[str, int] = {}
        self._sums: Counter[str] = Counter()

    def failed(self, error: Error) -> Error:
        """Record an error. Returns it, to be raised."""
        self.facts |= {"iteration": self._iterations, "has_error": 1, "error": str(error)}
        return error

    def sample(self, rate: int) -> None:
        """Sample every `rate`-th iteration. Raises UsageError for a rate below 1."""
        if rate < 1:
            why = "DDP runtime logging sample rate should be equal or greater than 1"
            raise self.failed(UsageError(f"the rate is {rate}; {why}"))
        self._rate = rate

    def begin(self) -> None:
        """A forward starts whose backward reduces."""
        self._sampling = self._iterations < ALWAYS or self._iterations % self._rate == 0
        self._iterations += 1
        self._marks.clear()
        self.mark(BEGUN)

    def mark(self, what: str) -> None:
        """Record the time, the first time in this iteration."""
        if self._sampling:
            self._marks.setdefault(what, time_ns())

    def end(self, ready: Iterable[int]) -> None:
        """Gradients are reduced. `ready`: parameters in the order of their gradients."""
        self.mark(REDUCED)
        if not self._sampling or not self._marks.keys() >= {BEGUN, GRADIENT, REDUCING}:
            return
        self._sampling = False
        spans = {
            name: max(self._marks[end] - self._marks[start], 0)
            for name, (start, end) in SPANS.items()
        }
        self._sums.update(spans)
        self._samples += 1
        self.facts |= {
            "iteration": self._iterations - 1,
            "prev_iteration_grad_ready_order_indices": ", ".join(map(str, ready)),
            **self._marks,
            **spans,
            **{f"avg_{name}": total // self._samples for name, total in self._sums.items()},
        }
