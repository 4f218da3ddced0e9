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

import threading

import torch

from ringdp.transport.threads import Queue

_queues: dict[torch.device, Queue] = {}
_lock = threading.Lock()


def launches(device: torch.device) -> Queue:
    """This process's."""
    with _lock:
        if device not in _queues:
            _queues[device] = Queue("ringdp-launches")
        return _queues[device]


def leave(device: torch.device) -> None:
    """Its queue may never move again: communicators that are made from now on have another."""
    with _lock:
        _queues.pop(device, None)
