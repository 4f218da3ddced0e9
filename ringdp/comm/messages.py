"""Messages from one rank to another: send, recv, and their `async` forms isend and irecv.

A message is received by a recv of the same tag that names its sender, or names none. Tags tell
messages apart: they may be received in any order. Of what one rank sends another under one tag, the
first sent is the first received. A recv must expect what comes: a message of another length or
dtype raises CollectiveMismatch on both ranks.

A send of up to a slab (64 KiB; less beyond 8 ranks) returns when the message is in shared memory,
where there is room for 16 on 2 ranks, 8 on 4, and 4 from 8 on; a longer one, when it has been
received. So two ranks that both send and then receive need isend, or short messages. Messages and
collectives do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ringdp.comm.arguments import index_of
from ringdp.comm.buffers import flat, flat_output
from ringdp.comm.call import ANYBODY, call_site, fingerprint
from ringdp.comm.graph_break import uncompiled
from ringdp.comm.guard import Guard
from ringdp.comm.job import Issuer
from ringdp.comm.work import Work
from ringdp.errors import UsageError
from ringdp.transport.records import Call


class Received(Work):
    """Returned by irecv."""

    def __init__(
        self, guard: Guard, call: Call, ticket: int, finish: Callable[[], None], sender: Tensor
    ) -> None:
        super().__init__(guard, call, ticket, finish)
        self._sender = sender

    @property
    def source(self) -> int:
        """The rank that sent the message, once it has come. Raises UsageError before."""
        if not self._done:
            raise UsageError("source: nothing has been received yet; allowed: after wait()")
        return int(self._sender)


@uncompiled
class Messages(Issuer):
    """The methods of a Communicator that two of its ranks call."""

    _posted = 0

    def send(self, tensor: Tensor, dst: int, *, tag: int = 0) -> None:
        """Send `tensor` (any shape and strides, any dtype of the collectives) to rank `dst`."""
        self._send(tensor, dst, tag, async_op=False)

    def isend(self, tensor: Tensor, dst: int, *, tag: int = 0) -> Work:
        """send that returns at once. The tensor must not be changed before `wait` has returned."""
        return self._send(tensor, dst, tag, async_op=True)

    def recv(self, tensor: Tensor, src: int | None = None, *, tag: int = 0) -> int:
        """`tensor` becomes the next message with this tag from rank `src`, or from any rank.

        Returns the rank that sent it. The message must have as many elements of the same dtype.
        """
        return self._recv(tensor, src, tag, async_op=False).source

    def irecv(self, tensor: Tensor, src: int | None = None, *, tag: int = 0) -> Received:
        """recv that returns at once. Nothing may touch the tensor before `wait` has returned."""
        return self._recv(tensor, src, tag, async_op=True)

    def _send(self, tensor: Tensor, dst: int, tag: int, async_op: bool) -> Work:
        to = self._other("send", "dst", dst)
        call, kind, later = self._letter("send", tensor, to, tag, async_op)
        buffer = flat(tensor).data
        ticket = self._transport.send(buffer, to, kind, background=later)
        return self._waited(Work(self._guard, call, ticket, None), later)

    def _recv(self, tensor: Tensor, src: int | None, tag: int, async_op: bool) -> Received:
        sender = None if src is None and self.size > 1 else self._other("recv", "src", src)
        call, kind, later = self._letter("recv", tensor, sender, tag, async_op)
        if later and not async_op:
            raise UsageError("recv in a group cannot say who sent; allowed: irecv")
        out = flat_output(tensor, "recv: tensor")
        source = torch.empty(1, dtype=torch.int64)
        ticket = self._transport.receive(out.data, sender, kind, source, background=later)
        return self._waited(Received(self._guard, call, ticket, out.settle, source), later)

    def _other(self, name: str, argument: str, peer: int | None) -> int:
        """A rank that is not this one."""
        others, found = [r for r in range(self.size) if r != self.rank], index_of(peer)
        if found is None or found not in others:
            raise UsageError(
                f"{name}: {argument} is {peer!r}; allowed: another rank, of {others} for rank "
                f"{self.rank} of {self.size}"
            )
        return found

    def _letter(
        self, name: str, tensor: Tensor, peer: int | None, tag: int, async_op: bool
    ) -> tuple[Call, int, bool]:
        """The call as errors tell it, the kind of message that both ends must agree on, and whether
        it is not waited for."""
        how = self._how(name, tensor, "", async_op, tag)
        dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
        mine = fingerprint(name, dtype, "sum", ANYBODY if peer is None else peer, tag=how.tag)
        call = (self._posted, mine, tensor.numel(), call_site(3))
        self._guard.check(call)
        self._posted += 1
        return call, fingerprint("send", dtype, "sum", 0, tag=how.tag), how.async_op
