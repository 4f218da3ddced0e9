"""What one collective receives over gloo: row by row, while the next row's message comes, too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor
from torch.distributed import ProcessGroup, Work

from ringdp.schedule.program import NONE, Program, Row
from ringdp.transport.base import FailureKind, Stamped
from ringdp.transport.c10d.wire import COLLECTIVE, Incoming
from ringdp.transport.rows import Rows
from ringdp.transport.store.failures import Failed


class Receiving:
    """The messages of one collective on one rank.

    `talking(peer)` encloses calls of the group, and `until(work, row)` waits for what that row
    receives.
    """

    def __init__(
        self,
        group: ProcessGroup,
        program: Program,
        rows: Rows,
        ours: Stamped,
        buffer: Tensor,
        talking: Callable[[int], AbstractContextManager[None]],
        until: Callable[[Work, Row], None],
    ) -> None:
        self._group, self._program, self._rows = group, program, rows
        self._ours, self._buffer = ours, buffer
        self._talking, self._until = talking, until
        self._expected = dict[int, Incoming]()  # by row, until its payload begins to come
        self._begun = dict[int, tuple[Tensor, Work | None]]()  # where it comes, and until when
        self.posted = self._expected, self._begun  # what gloo may write to

    def post(self) -> None:
        """Post the receives of all first parts at once, so that they may come in any order."""
        for at, row in enumerate(self._program):
            if row.recv_peer != NONE:
                message = self._expected[at] = Incoming(self._group, row.recv_peer, COLLECTIVE)
                with self._talking(row.recv_peer):
                    message.post()

    def value(self, at: int) -> Tensor | None:
        """Return what row `at` receives, if it receives anything. Raises Failed."""
        row, after = self._program.listed[at], self._program.listed[at + 1 : at + 2]
        if row.recv_peer == NONE:
            return None
        self._begin(at)
        # Peers may need what this row sends before they send the next; and no two may come into one
        # chunk at once.
        if row.send_peer == NONE and after and after[0].dst_chunk != row.dst_chunk:
            self._begin(at + 1)
        into, part = self._begun.pop(at)
        if part is not None:
            self._until(part, row)
        return into

    def _begin(self, at: int) -> None:
        """Begin to receive row `at`'s payload, once its stamp has come and is right."""
        if at not in self._expected:
            return  # it has begun, or there is none
        row, message = self._program.listed[at], self._expected.pop(at)
        self._until(message.first, row)
        found, size, room = message.stamp, self._buffer.element_size(), self._rows.room(row)
        expected = self._ours.call[0], self._ours.digest, found[2] if room is None else room * size
        if found != expected or found[2] % size or not 0 <= found[2] <= self._buffer.nbytes:
            raise Failed(FailureKind.MISMATCH, row.recv_peer, expected, found)
        into = self._rows.place(at)
        if into is None:
            into = self._buffer.new_empty(found[2] // size)
        with self._talking(row.recv_peer):
            self._begun[at] = into, message.begin(into, row.recv_peer)
