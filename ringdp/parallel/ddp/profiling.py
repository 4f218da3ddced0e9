"""DDP in torch's profiler, under the names that torch's class has there.

    DistributedDataParallel.forward
    search_unused_parameters         with find_unused_parameters
    gloo:all_reduce                  from a reduction's start until its result is there
    gloo:broadcast                   of buffers, and of the order of buckets

"gloo" stands for the backend of torch's default group, or "ringdp" if there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler
from torch.futures import Future

from ringdp.comm import Communicator
from ringdp.comm.backend.works import GroupWork, Watcher


def span(name: str) -> AbstractContextManager[object]:
    """A span in the profile, if a profiler runs."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else nullcontext()


def backend(group: Any = None) -> str:
    """The name of a torch.distributed group's backend."""
    return dist.get_backend(group) if dist.is_initialized() else "ringdp"


def broadcast() -> AbstractContextManager[object]:
    """A span around a broadcast."""
    return span(f"{backend()}:broadcast")


def all_reduce(comm: Communicator, flat: Tensor, *, tag: int) -> Callable[[], object]:
    """Start an all_reduce. Returns a function that waits for it. If a profiler runs, a thread ends
    its span when it is complete: torch calls a span asynchronous only if another thread ends it."""
    if not profiler._is_profiler_enabled:
        return comm.all_reduce(flat, async_op=True, tag=tag).wait
    seen, watcher = profiler.record_function(f"{backend()}:all_reduce"), Watcher()
    ended: Future[Any] = Future()
    seen.__enter__()  # type: ignore[no-untyped-call]
    work = comm.all_reduce(flat, async_op=True, tag=tag)
    seen._call_end_callbacks_on_future(ended)
    watcher.watch(GroupWork([work], [flat]), ended)
    watcher.stop()

    def wait() -> None:
        try:
            work.wait()
        finally:
            watcher.join()  # a span that ends after its profiler writes to freed memory

    return wait
