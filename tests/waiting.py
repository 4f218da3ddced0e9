"""Waits for a condition that another thread or process brings about."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 60.0  # more than a busy machine takes


def wait_until(
    condition: Callable[[], object], seconds: float = SECONDS, state: Callable[[], object] = str
) -> None:
    """Returns once the condition holds. Fails after that time, and shows the `state`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not in {seconds} s: {state()}"
        time.sleep(0.01)


def used_asleep(seconds: float) -> float:
    """The processor time, in s, that this process's other threads use while this one sleeps."""
    before = time.process_time()
    time.sleep(seconds)
    return time.process_time() - before
