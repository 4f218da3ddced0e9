"""torch's send and recv. Messages and collectives of a group do not wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ringdp.comm.backend.calls import Calls, movable, single
from ringdp.comm.backend.works import GroupWork, span_of
from ringdp.comm.work import Work


class Messages(Calls):
    """The point-to-point methods of a group. Ranks are numbered within the group."""

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> GroupWork:
        tensor = single(tensors, "send: tensors")
        return self._message(
            "send", tensor, lambda: self._comm.isend(movable(tensor), dst, tag=tag)
        )

    def recv(self, tensors: Sequence[Tensor], src: int | None, tag: int = 0) -> GroupWork:
        tensor = single(tensors, "recv: tensors")
        return self._message(
            "recv", tensor, lambda: self._comm.irecv(movable(tensor), src, tag=tag)
        )

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> GroupWork:
        return self.recv(tensors, None, tag)

    def _message(self, what: str, tensor: Tensor, begin: Callable[[], Work]) -> GroupWork:
        # Not the group's watcher: a message that never arrives must not block collectives' futures.
        span = span_of(what)
        work = GroupWork([begin()], [tensor], (), None, None)
        if span is not None:
            span.end_with(work)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work
