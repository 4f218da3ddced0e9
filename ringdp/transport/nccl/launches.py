"""All that a process launches on a device by NCCL, in the order of the calls, by one thread.

What NCCL has launched waits on the device for other ranks. A device need not run side by side what
two communicators launch: where one rank launches A's before B's and another B's before A's, each
may wait for ever. So communicators of one device share a queue, and the order of the calls, which
must then be that of all ranks over all communicators, is the order of the launches.

A launch does not wait for the device, so nobody's work holds up another's; where NCCL itself waits
for a rank that is gone, for as long as it takes that communicator to be aborted. On the host a call
returns when it has been done: there every communicator has a thread of its own, and no such order.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from functools import cache

import torch

from ringdp.transport import threads


class Launches:
    """One device's."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threads.at_exit(self)
        threads.spawn(self._loop, "ringdp-nccl-launches")

    def put(self, job: Callable[[], object]) -> None:
        """Run it after all that were put before. What it raises is shown, and ends no other."""
        self._jobs.put(job)

    def end(self) -> None:
        """See `Ending`."""
        self._jobs.put(None)

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException:
                shown = (*sys.exc_info(), threading.current_thread())
                threading.excepthook(threading.ExceptHookArgs(shown))
            del job  # and the buffers that it holds


@cache
def launches(device: torch.device) -> Launches:
    """This process's."""
    return Launches()


os.register_at_fork(after_in_child=launches.cache_clear)  # a child has no thread of its parent's
