"""All that a process's communicators launch on a device, in the order of the calls, by one thread.

What they have launched waits on the device for other ranks. A device need not run side by side what
two communicators launch: where one rank launches A's before B's and another B's before A's, each
may wait for ever. So communicators of one device share a queue, and the order of the calls, which
must then be that of all ranks over all communicators, is the order of the launches.

Two things launch beside the queue: the replay of a graph, on its caller's thread, and the making of
a communicator. So whoever does either first waits for what is async, on all ranks.

A launch does not wait for the device, so nobody's work holds up another's; where NCCL itself waits
for a rank that is gone, until that communicator has been aborted. An abort can hang as well: then
communicators that are made afterwards have another queue. On the host a call
returns when it has been done: there every communicator has a thread of its own, and no such order.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable

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

    @torch.inference_mode()  # in which a job may write to whatever tensor there is
    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException:
                threading.excepthook(  # under no name, which would keep all that the job held
                    threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
                )
            del job  # and the buffers that it holds


_queues: dict[torch.device, Launches] = {}
_lock = threading.Lock()


def launches(device: torch.device) -> Launches:
    """This process's."""
    with _lock:
        if device not in _queues:
            _queues[device] = Launches()
        return _queues[device]


def leave(device: torch.device) -> None:
    """Its queue may never move again: communicators that are made from now on have another."""
    with _lock:
        _queues.pop(device, None)
