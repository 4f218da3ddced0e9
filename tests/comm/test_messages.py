"""send, recv, isend, irecv: delivery, order, tags, tensor layouts and refused arguments."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

import ringdp
from ringdp import Communicator
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

LARGE = 100_000  # float32; several slabs


def message_of(src: int, dst: int, index: int, elements: int) -> Tensor:
    return torch.arange(elements, dtype=torch.float32) + 1000 * src + 100 * dst + index


def check_exchange(comm: Communicator) -> None:
    """The usual order in torch scripts: all ranks send to all, then receive."""
    for elements in (0, 1, LARGE):
        others = [r for r in range(comm.size) if r != comm.rank]
        sends = [comm.isend(message_of(comm.rank, r, 0, elements), r) for r in others]
        found = [torch.zeros(elements) for _ in others]
        receives = [comm.irecv(x, r) for x, r in zip(found, others, strict=True)]
        for work in (*sends, *receives):
            work.wait()
        for r, x, work in zip(others, found, receives, strict=True):
            assert torch.equal(x, message_of(r, comm.rank, 0, elements))
            assert work.source == r
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x, y = torch.full((LARGE,), float(comm.rank)), torch.zeros(LARGE)
    if comm.rank == 0:  # blocking calls around the ring
        comm.send(x, after)
        x.fill_(-1)  # `send` has returned
        assert comm.recv(y, before) == before
    else:
        assert comm.recv(y, before) == before
        comm.send(x, after)
        x.fill_(-1)
    assert torch.all(y == before)


def check_any_order(comm: Communicator, seed: int) -> None:
    """Messages of all sizes under a few tags, received in another order than sent."""
    rng = random.Random(seed)  # the same on all ranks
    me, works = comm.rank, []
    pairs = [(s, d) for s in range(comm.size) for d in range(comm.size) if s != d]
    sent = [
        (s, d, i, rng.choice((0, 1, 10, 5000, LARGE)), rng.randrange(3))
        for s, d in pairs
        for i in range(rng.randrange(6))
    ]
    for s, d, i, elements, tag in sent:
        if s == me:
            works.append((comm.isend(message_of(s, d, i, elements), d, tag=tag), None, None))
    mine = [m for m in sent if m[1] == me]
    order = [(m[0], m[4]) for m in mine]
    random.Random(seed + me).shuffle(order)  # messages of one sender and tag keep their order
    for sender, tag in order:
        at = next(k for k, m in enumerate(mine) if (m[0], m[4]) == (sender, tag))
        s, d, i, elements, _ = mine.pop(at)
        x = torch.full((elements,), -1.0)
        works.append((comm.irecv(x, s, tag=tag), x, message_of(s, d, i, elements)))
    random.Random(seed - me).shuffle(works)
    for work, found, expected in works:
        work.wait()
        assert expected is None or torch.equal(found, expected)


@on_ranks(2)
def test_messages_in_progress_are_polled_once_per_call(comm: Communicator) -> None:
    transport, x = comm._transport, torch.zeros(40)
    mail = transport._mail
    if comm.rank == 1:
        comm.barrier()
        for tag in range(40):
            comm.send(x, 0, tag=tag)
        return
    with patch.object(transport, "_mail", Mock(wraps=mail)) as spy:
        works = [comm.irecv(x[tag : tag + 1].repeat(40), 1, tag=tag) for tag in range(40)]
    assert len(transport.messages) == 40
    comm.barrier()
    for work in works:
        work.wait()
    assert spy.ended.call_count == 40
    assert not transport.messages


def check_short_messages_need_no_receiver(comm: Communicator) -> None:
    """Blocking sends before any receive, received in the opposite order of tags."""
    if comm.rank == 0:
        for tag in range(4):
            comm.send(message_of(0, 1, tag, 1000), 1, tag=tag)
        comm.barrier()
    if comm.rank == 1:
        comm.barrier()
        for tag in (3, 1, 2, 0):
            x = torch.zeros(1000)
            comm.recv(x, 0, tag=tag)
            assert torch.equal(x, message_of(0, 1, tag, 1000))
    if comm.rank > 1:
        comm.barrier()


def check_any_source(comm: Communicator) -> list[int]:
    """Rank 0 receives from any source, small and large messages."""
    found = []
    if comm.rank == 0:
        for elements, tag in ((10, 1), (LARGE, 2)):
            for _ in range(comm.size - 1):
                x = torch.zeros(elements)
                source = comm.recv(x, tag=tag)
                assert torch.equal(x, message_of(source, 0, 0, elements))
                found.append(source)
    else:
        comm.isend(message_of(comm.rank, 0, 0, LARGE), 0, tag=2)
        comm.send(message_of(comm.rank, 0, 0, 10), 0, tag=1)
    comm.barrier()
    return found


def check_messages_during_collectives(comm: Communicator) -> None:
    """A long message makes progress while its sender is in a collective and no rank waits for
    it."""
    x, y = torch.arange(float(LARGE)), torch.zeros(LARGE)
    if comm.rank == 0:
        work = comm.isend(x, 1)
        comm.barrier()
        work.wait()
    elif comm.rank == 1:
        comm.recv(y, 0)
        assert torch.equal(x, y)
        comm.barrier()
    else:
        comm.barrier()


def check_short_messages_are_received_in_the_background(comm: Communicator) -> None:
    """More than the channel holds, soon after other messages, and once the thread has slept."""
    x = torch.zeros(40, 4)
    for pause in (0.0, 0.0, 0.02):
        time.sleep(pause)
        if comm.rank == 0:
            works = [comm.irecv(row, 1) for row in x]
        else:
            for row in x:
                comm.send(row, 0)
        comm.barrier()  # no rank waits for the messages
        if comm.rank == 0:
            for work in works:
                work.wait()


def check_layouts(comm: Communicator) -> None:
    other = 1 - comm.rank
    complex_ = torch.randn(6, 5, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    views: list[Callable[[Tensor], Tensor]] = [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[::2, 1:3],
        lambda x: x.conj(),
        lambda x: x.real,
        lambda x: x[0, 0],
        lambda x: x[:0],
        lambda x: x.real.clone().requires_grad_(),
    ]
    for view in views:
        out = view(torch.zeros_like(complex_))
        works = [comm.isend(view(complex_), other), comm.irecv(out, other)]
        for work in works:
            work.wait()
        assert torch.equal(out, view(complex_))


@pytest.mark.parametrize(
    ("what", "n"),
    [
        (check_exchange, 2),
        (check_exchange, 4),
        (check_short_messages_need_no_receiver, 2),
        (check_any_source, 4),
        (check_messages_during_collectives, 3),
        (check_short_messages_are_received_in_the_background, 2),
        (check_layouts, 2),
    ],
)
def test_messages_arrive(ranks, what: Callable[[Communicator], object], n: int):
    ranks(n)(what)


@pytest.mark.parametrize("seed", range(4))
def test_messages_arrive_in_any_order(ranks, seed: int):
    ranks(3)(check_any_order, seed)


@on_ranks(3)
def test_message_memory_is_mapped_by_senders_and_receivers_only(comm: Communicator) -> None:
    maps = Path("/proc/self/maps")
    with comm.duplicate() as other:
        before = maps.read_text(encoding="utf-8").count("memfd:ringdp-mail")
        if comm.rank < 2:
            other.isend(torch.zeros(LARGE), 1 - comm.rank)
            other.recv(torch.zeros(LARGE), 1 - comm.rank)
        mapped = maps.read_text(encoding="utf-8").count("memfd:ringdp-mail") - before
        other.barrier()
    assert mapped == (comm.rank < 2)


@on_ranks(2)
def test_wrong_arguments_of_messages_are_refused(comm: Communicator) -> None:
    x = torch.zeros(3)
    for call, message in (
        (lambda: comm.send(x, comm.rank), "dst is"),
        (lambda: comm.send(x, 2), "dst is 2"),
        (lambda: comm.recv(x, -1), "src is -1"),
        (lambda: comm.recv(x, comm.rank), "src is"),
        (lambda: comm.send(x, 1 - comm.rank, tag=-1), "tags are"),
        (lambda: comm.send(x.to(torch.uint16), 1 - comm.rank), "uint16"),
        (lambda: comm.recv(torch.zeros(1).expand(3), 1 - comm.rank), "expand"),
        (lambda: comm.recv(x.to("meta"), 1 - comm.rank), "CPU"),
    ):
        with pytest.raises(ringdp.UsageError, match=message):
            call()
