"""The launch queue of a device: one thread launches for all communicators, in call order.

A launched collective waits on the device for other ranks, and a device may run the collectives of
two communicators one after the other. If one rank launches A's before B's and another B's before
A's, each may wait forever. So all communicators of a device share one queue, and launches follow
the order of the calls. That order, over all communicators, must be the same on all ranks.

Two things bypass the queue: the replay of a graph, on its caller's thread, and the creation of a
communicator. Before either, the caller must wait for all async collectives, on all ranks.

A launch does not wait for the device, so communicators do not hold each other up. The exception is
a launch in which NCCL waits for a rank that is gone: it blocks the queue until its communicator has
been aborted. An abort can hang as well; then later communicators get a new queue. On the host a
call blocks until it is done, so each communicator has its own thread and this order does not apply.
"""

from __future__ import annotations

import threading

import torch

from ringdp.transport.threads import Queue

_queues: dict[torch.device, Queue] = {}
_lock = threading.Lock()


def launches(device: torch.device) -> Queue:
    """The launch queue of `device` in this process."""
    with _lock:
        if device not in _queues:
            _queues[device] = Queue("ringdp-launches")
        return _queues[device]


def leave(device: torch.device) -> None:
    """Abandon the queue of `device`, which may be stuck: later communicators get a new one."""
    with _lock:
        _queues.pop(device, None)
