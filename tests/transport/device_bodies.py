"""What is asked of every transport whose collectives a device runs, by its tests on the host."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import ringdp
from ringdp import Communicator
from ringdp.comm import rendezvous
from ringdp.transport import answers
from tests.comm import test_forms, test_groups, test_messages
from tests.comm.failing import Heard, hear, until_failed
from tests.forks import PATIENCE
from tests.parallel.test_engine import BATCH, STEPS, batch, equal, model, train
from tests.transport.test_conformance import Case, digest, given


def calls(comm: Communicator) -> None:
    """What the communicator's own tests ask of shared memory."""
    test_forms.moved(comm, 10)
    test_forms.added(comm, 10)
    test_forms.begun_in_inference_mode(comm)
    test_messages.exchange(comm)
    test_messages.anybody(comm)
    test_messages.beside_collectives(comm)
    test_groups.parts.__wrapped__(comm)
    test_groups.together(comm)
    with comm.duplicate() as other, other.group():
        x = torch.ones(3)
        other.all_reduce(x)
        comm.barrier()
    assert torch.all(x == comm.size)
    with pytest.raises(ringdp.UsageError, match="moves tensors on cpu"):
        comm.all_reduce(torch.zeros(1, device="meta"))


MISTAKES = ("collective", "roots", "length", "dtype", "sizes", "message", "late")


def mistaken(comm: Communicator, what: str) -> Heard | None:
    x, odd = torch.ones(5000), comm.rank == 1
    sizes = [2500, 2500] if odd else [2000, 3000]
    act = {
        "collective": lambda: comm.broadcast(x) if odd else comm.all_reduce(x),
        "roots": lambda: comm.broadcast(x, 1 - comm.rank),  # each waits for the other's data
        "length": lambda: comm.all_reduce(x[1:] if odd else x),
        "dtype": lambda: comm.all_reduce(x.int() if odd else x),
        "sizes": lambda: comm.all_gather_v(x, x[: sizes[comm.rank]], sizes),
        "message": lambda: comm.recv(x[1:], 0) if odd else comm.send(x, 1),
        "late": lambda: until_failed(comm) if odd else comm.all_reduce(x, async_op=True).wait(0.3),
    }[what]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "PATIENCE", PATIENCE)  # a busy machine is slow
        return hear(comm, act, comm.barrier, comm.barrier)


def check_mistaken(said: Iterable[Heard | None], what: str) -> None:
    """What all ranks have heard of it."""
    for heard in said:
        assert heard is not None
        wanted = "CollectiveTimeout" if what == "late" else "CollectiveMismatch"
        assert heard.error == heard.again == wanted, heard
        if what == "collective":
            assert "rank 0: all_reduce #0 (float32, sum) of 5000 elements" in heard.text
            assert "rank 1: broadcast #0 (float32, root 0) of 5000 elements" in heard.text
            assert heard.text.count("device_bodies.py:") == 4  # in two lines, and in the table


def left_behind(comm: Communicator, transport: str) -> Heard | None:
    """By rank 1, in collectives for which nobody waits on the host."""
    c = ringdp.init(transport=transport, timeout=PATIENCE)
    rendezvous._world = comm
    c.barrier()
    if comm.rank == 1:
        c.close()
        return None
    for _ in range(2):
        c.all_reduce(torch.ones(9), async_op=True)
    until = time.monotonic() + PATIENCE / 6
    while c._transport.failure() is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    heard = hear(c, c.barrier)
    c.close()
    return heard


def check_left_behind(said: Iterable[Heard | None]) -> None:
    here, nothing, there = said
    assert nothing is None
    for heard in (here, there):
        assert heard is not None
        assert heard.error == heard.again == "PeerLost", heard
        assert "rank 1 has ended (it has closed)" in heard.text


class Trained(NamedTuple):
    losses: list[float]
    parameters: list[Tensor]
    sent: list[int]


def staged(comm: Communicator, stage: int) -> Trained:
    run = train(comm, stage)
    return Trained(run.losses, run.parameters, run.sent)


def ddp(comm: Communicator, device: str = "cpu") -> Trained:
    net, losses, sent = model(comm.rank).to(device), list[float](), list[int]()
    wrapped = ringdp.DistributedDataParallel(net, process_group=comm)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(3):
        loss = wrapped(batch(step)[comm.rank :: comm.size].to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        sent.append(wrapped.sent_bytes())
    return Trained(losses, [p.detach().cpu() for p in net.parameters()], sent)


def clipped(comm: Communicator, device: str = "cpu") -> list[float]:
    """In stage 3 with a scaled loss: every step's, and its gradients' norm, which is too large."""
    net = model().to(device)
    engine = ringdp.shard(net, stage=3, comm=comm)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = ringdp.LossScaler(engine)
    rows, out = BATCH // comm.size, list[float]()
    for step in range(STEPS):
        x = batch(step)[comm.rank * rows :][:rows].to(device)
        loss = net(x).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        assert scaler.unscale_()
        norm = ringdp.clip_grad_norm_(engine, 5.0)
        assert norm > 5
        scaler.step(optimizer)
        out += [loss.item(), norm]
    engine.close()
    return out


def check_trained(found: Iterable[Trained], wanted: Iterable[Trained]) -> None:
    for here, there in zip(found, wanted, strict=True):
        assert here.losses == there.losses
        assert equal(here.parameters, there.parameters)
        assert here.sent == there.sent


def all_reduced(comm: Communicator, cases: list[Case]) -> list[bytes]:
    """On a GPU."""
    out = []
    for case in cases:
        x = given(case, comm.rank, comm.size).cuda()
        comm.all_reduce(x, case.op, algorithm=case.algorithm)
        out.append(digest(x.cpu()))
    return out


def captured(comm: Communicator) -> None:
    """In a CUDA graph."""
    x = torch.full((100_003,), float(comm.rank + 1), device="cuda")
    comm.all_reduce(x.clone())  # what a capture cannot make is there before it
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.all_reduce(x)
        x.mul_(0.5)
    for times in range(1, 4):
        x.fill_(comm.rank + times)
        graph.replay()
        assert torch.all(x == (2 * times + 1) / 2)
