"""Messages over a torch.distributed group arrive as sent, whatever their length."""

from __future__ import annotations

import pytest
import torch

from ringdp.transport.c10d import wire


@pytest.mark.parametrize("length", [0, 1, wire.INLINE, wire.INLINE + 1, 5 * wire.INLINE])
def test_messages_of_any_length_arrive(length: int):
    class Loop:
        """A group of one rank that delivers in order."""

        sent: list[torch.Tensor] = []  # noqa: RUF012

        def send(self, tensors: list[torch.Tensor], _: int, __: int) -> None:
            self.sent.append(tensors[0])

        def recv(self, tensors: list[torch.Tensor], _: int, __: int) -> None:
            tensors[0].copy_(self.sent.pop(0))

    loop = Loop()
    given = torch.arange(length) % 251
    wire.send(loop, given.byte(), 0, (7, 9, 0), 0, 0)
    message = wire.Incoming(loop, 0, 0)
    assert message.stamp == (7, 9, length)
    out = torch.zeros(length, dtype=torch.uint8)
    message.take(out, 0, 0, lambda _: None)
    assert torch.equal(out, given.byte())
    assert not loop.sent
