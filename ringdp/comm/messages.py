"""Point-to-point messages: send and recv, and their asynchronous forms isend and irecv.

A recv matches messages with its tag from the rank that it names, or from any rank if it names none.
Messages with different tags may be received in any order. Messages from one rank to another with
the same tag are received in the order sent. A message of another length or dtype than the recv
expects raises CollectiveMismatch on both ranks.

A send of up to one slab (64 KiB; less beyond 8 ranks) returns when the message is in shared memory,
which has room for 16 of them on 2 ranks, 8 on 4 and 4 from 8 on. A longer send returns when it has
been received. So two ranks that both send first and receive then need isend, or short messages.
Messages and collectives do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ringdp.comm.arguments import check_tensor, index_of, real_dtype
from ringdp.comm.buffers import flat, flat_output
from ringdp.comm.call import ANY_RANK, fingerprint
from ringdp.comm.guard import Guard
from ringdp.comm.job import Issuer
from ringdp.comm.work import Work
from ringdp.errors import UsageError
from ringdp.transport.records import Call, call_site
from ringdp.transport.repeated import repeated


class Received(Work):
    """The Work that irecv returns."""

    def __init__(
        self, guard: Guard, call: Call, ticket: int, finish: Callable[[], None], sender: Tensor
    ) -> None:
        super().__init__(guard, call, ticket, finish)
        self._sender = sender

    @property
    def source(self) -> int:
        """The rank that sent the message. Raises UsageError before the message has arrived."""
        if not self._done:
            raise UsageError("source: nothing has been received yet; allowed: after wait()")
        return int(self._sender)


class Messages(Issuer):
    """The point-to-point methods of a Communicator."""

    _posted = 0

    @repeated
    def send(self, tensor: Tensor, dst: int, *, tag: int = 0) -> None:
        """Send `tensor` to rank `dst`: any shape and strides, any dtype that collectives take."""
        self._send(tensor, dst, tag, async_op=False)

    @repeated
    def isend(self, tensor: Tensor, dst: int, *, tag: int = 0) -> Work:
        """send that returns at once. Do not change the tensor until `wait` has returned."""
        return self._send(tensor, dst, tag, async_op=True)

    @repeated
    def recv(self, tensor: Tensor, src: int | None = None, *, tag: int = 0) -> int:
        """Receive the next message with this tag from rank `src`, or from any rank if None.

        The message must have the length and dtype of `tensor`. Returns the rank that sent it.
        """
        return self._recv(tensor, src, tag, async_op=False).source

    def irecv(self, tensor: Tensor, src: int | None = None, *, tag: int = 0) -> Received:
        """recv that returns at once. Do not touch the tensor until `wait` has returned."""
        return self._recv(tensor, src, tag, async_op=True)

    def _send(self, tensor: Tensor, dst: int, tag: int, async_op: bool) -> Work:
        to = self._other("send", "dst", dst)
        call, kind, later = self._new_message("send", tensor, to, tag, async_op)
        buffer = flat(tensor).data
        ticket = self._transport.send(buffer, to, kind, background=later)
        return self._wait_if_sync(Work(self._guard, call, ticket, None), later)

    def _recv(self, tensor: Tensor, src: int | None, tag: int, async_op: bool) -> Received:
        sender = None if src is None and self.size > 1 else self._other("recv", "src", src)
        call, kind, later = self._new_message("recv", tensor, sender, tag, async_op)
        if later and not async_op:
            raise UsageError("recv in a group cannot say who sent; allowed: irecv")
        out = flat_output(tensor, "recv: tensor")
        source = torch.empty(1, dtype=torch.int64, device="cpu")
        ticket = self._transport.receive(out.data, sender, kind, source, background=later)
        return self._wait_if_sync(Received(self._guard, call, ticket, out.copy_back, source), later)

    def _other(self, name: str, argument: str, peer: int | None) -> int:
        """Return `peer` as an int. Raises UsageError unless it is another rank."""
        others, found = [r for r in range(self.size) if r != self.rank], index_of(peer)
        if found is None or found not in others:
            raise UsageError(
                f"{name}: {argument} is {peer!r}; allowed: another rank, of {others} for rank "
                f"{self.rank} of {self.size}"
            )
        return found

    def _new_message(
        self, name: str, tensor: Tensor, peer: int | None, tag: int, async_op: bool
    ) -> tuple[Call, int, bool]:
        """Return the call for errors, the fingerprint that both ends must share, and async_op.

        async_op is also True in a group.
        """
        check_tensor(name, tensor)
        spec = self._spec(name, "", async_op, tag)
        dtype = real_dtype(tensor)
        mine = fingerprint(name, dtype, "sum", ANY_RANK if peer is None else peer, tag=spec.tag)
        number = self._posted + (self._ready.messages if self._ready else 0)
        call = (number, mine, tensor.numel(), call_site())
        self._guard.check(call)
        self._posted += 1
        return call, fingerprint("send", dtype, "sum", 0, tag=spec.tag), spec.async_op
