"""Messages over a torch.distributed group arrive as sent, whatever their length."""

from __future__ import annotations

import pytest
import torch

from ringdp.transport.c10d import wire


@pytest.mark.parametrize("length", [0, 1, wire.INLINE, wire.INLINE + 1, 5 * wire.INLINE])
@pytest.mark.parametrize("tag", [wire.COLLECTIVE, wire.USERS])
def test_messages_of_any_length_arrive(length: int, tag: int):
    class Loop:
        """A group of one rank that delivers what has a tag in order."""

        sent: list[tuple[int, torch.Tensor]] = []  # noqa: RUF012

        def send(self, tensors: list[torch.Tensor], _: int, tag: int) -> None:
            self.sent.append((tag, tensors[0]))

        def recv(self, tensors: list[torch.Tensor], _: int, tag: int) -> None:
            at = next(i for i, (t, _) in enumerate(self.sent) if t == tag)
            _, message = self.sent.pop(at)
            assert len(message) <= len(tensors[0])  # gloo would abort the process
            tensors[0][: len(message)] = message

    loop = Loop()
    given = torch.arange(length) % 251
    list(wire.sends(loop, given.byte(), 0, tag, 7, 9))
    message = wire.Incoming(loop, 0, tag)
    message.post()
    assert message.stamp == (7, 9, length)
    out = torch.zeros(length, dtype=torch.uint8)
    message.begin(out, 0)
    assert torch.equal(out, given.byte())
    assert not loop.sent
