"""When things happened in the iterations of DDP that are sampled. Nanoseconds since the epoch.

    forward_compute    from forward's begin to the first gradient
    backward_compute   from there until autograd is through
    backward_comm      from the first bucket's start until all are reduced
    overlap            the part of backward_comm that lies in backward_compute

As torch's DDP samples: the first ten iterations, then every hundredth or what has been asked for.
And what went wrong, under the keys `has_error` and `error`.
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
    """Of one DDP. `facts`: of the last iteration that was sampled or failed, by torch's keys."""

    def __init__(self) -> None:
        self.facts: dict[str, int | str] = {}
        self.sampling = False  # in this iteration
        self._rate = 100
        self._iterations = self._samples = 0
        self._marks: dict[str, int] = {}
        self._sums: Counter[str] = Counter()

    def failed(self, error: Error) -> Error:
        """The same, for who raises it."""
        self.facts |= {"iteration": self._iterations, "has_error": 1, "error": str(error)}
        return error

    def sample(self, rate: int) -> None:
        """Every `rate`-th iteration. Raises UsageError."""
        if rate < 1:
            raise self.failed(
                UsageError(
                    f"the rate is {rate}; DDP runtime logging sample rate should be equal or "
                    "greater than 1"
                )
            )
        self._rate = rate

    def begin(self) -> None:
        """A forward whose backward shall reduce."""
        self.sampling = self._iterations < ALWAYS or self._iterations % self._rate == 0
        self._iterations += 1
        self._marks.clear()
        self.mark(BEGUN)

    def mark(self, what: str) -> None:
        """Its first time in this iteration is now."""
        if self.sampling:
            self._marks.setdefault(what, time_ns())

    def end(self, ready: Iterable[int]) -> None:
        """Gradients are reduced; `ready`: parameters in the order in which they came."""
        self.mark(REDUCED)
        if not self.sampling or not self._marks.keys() >= {BEGUN, GRADIENT, REDUCING}:
            return
        self.sampling = False
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
