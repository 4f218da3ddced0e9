"""What torch's profiler sees of DDP, under the names that torch's class has there:

DistributedDataParallel.forward
search_unused_parameters         where they are sought
gloo:all_reduce                  from a reduction's start until its result is there
gloo:broadcast                   of buffers, and of the order of buckets

with the backend of torch's default group, as gloo, or "ringdp" where there is none.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler
from torch.futures import Future

from ringdp.comm import Communicator, Work
from ringdp.comm.backend.works import GroupWork, Watcher


def span(name: str) -> AbstractContextManager[object]:
    """Around what is to be seen, where something is profiled."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else nullcontext()


def backend(group: Any = None) -> str:
    """Of a torch.distributed group: the name under which torch's class would be seen."""
    return dist.get_backend(group) if dist.is_available() and dist.is_initialized() else "ringdp"


def broadcast() -> AbstractContextManager[object]:
    """A span around one."""
    return span(f"{backend()}:broadcast" if profiler._is_profiler_enabled else "")


class _Seen(NamedTuple):
    """A reduction that a profiler sees. A span that ends after its profiler is written to memory
    that is no longer there, so who waits for the one waits for the other."""

    work: Work
    watcher: Watcher

    def wait(self) -> None:
        try:
            self.work.wait()
        finally:
            self.watcher.join()


def all_reduce(comm: Communicator, flat: Tensor, *, tag: int) -> Work | _Seen:
    """The sum over ranks, begun. Where it is to be seen, a thread tells when it has ended."""
    if not profiler._is_profiler_enabled:
        return comm.all_reduce(flat, async_op=True, tag=tag)
    seen, watcher = profiler.record_function(f"{backend()}:all_reduce"), Watcher()
    ended: Future[Any] = Future()
    seen.__enter__()  # type: ignore[no-untyped-call]
    work = comm.all_reduce(flat, async_op=True, tag=tag)
    seen._call_end_callbacks_on_future(ended)
    watcher.watch(GroupWork([work], [flat], [], None, None), ended)
    watcher.stop()
    return _Seen(work, watcher)
