"""Several calls that are waited for once.

    with comm.group():
        comm.all_reduce(a)
        comm.all_gather(b, c)
        comm.isend(d, dst=1)

Each call in the block is issued at once, in order, and none is waited for before the block ends. A
group is no transaction and no fusion: the bits, the messages and the errors are those of the calls.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from ringdp.comm.asked import own_patience
from ringdp.comm.work import Work
from ringdp.errors import CommunicationError


class Group:
    """Works, as those of a block, as one: to wait for, or to ask for."""

    def __init__(self, works: Iterable[Work] = ()) -> None:
        self.works = [*works]

    def wait(self, timeout: float | None = None) -> None:
        """Block until all results are there, at most `timeout` seconds for all of them together.

        Raises the error of the first call that failed.
        """
        end = None if timeout is None else time.monotonic() + own_patience(timeout)
        for work in self.works:
            work.wait(None if end is None else max(0.0, end - time.monotonic()))

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self.exception() is not None or all(w.is_completed() for w in self.works)

    def exception(self) -> CommunicationError | None:
        """The error of the first call that failed, or None."""
        return next((e for w in self.works if (e := w.exception())), None)
