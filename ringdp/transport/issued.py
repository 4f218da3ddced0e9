"""What is prepared where nothing can be: every start is issued anew."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ringdp.transport.records import Call

# A call and its buffers, whole and part; returns a ticket.
Issue = Callable[[Call, Tensor | None, Tensor | None], int]


class Issued:
    """See `Prepared`."""

    def __init__(self, issue: Issue, kind: int, elements: int) -> None:
        self._issue, self._kind, self._elements = issue, kind, elements

    def start(self, whole: Tensor | None, part: Tensor | None, number: int, site: bytes, /) -> int:
        return self._issue((number, self._kind, self._elements, site), whole, part)

    run = start
