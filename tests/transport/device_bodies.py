"""Bodies of tests for transports whose collectives a device runs, on the host or on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import ringdp
from ringdp import Communicator
from tests.parallel.test_engine import BATCH, STEPS, batch, model
from tests.transport.test_conformance import Case, digest, input_of


class Trained(NamedTuple):
    losses: list[float]
    parameters: list[Tensor]
    sent: list[int]


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


def adafactor(comm: Communicator, device: str = "cpu") -> Trained:
    """In stage 3; steps look at whole parameters, some of which lie on both ranks."""
    return _train(comm, device, torch.optim.Adafactor)


def in_replicas(comm: Communicator, device: str = "cpu") -> Trained:
    """In stage 3, with two replicas."""
    return _train(comm, device, torch.optim.AdamW, shard_size=comm.size // 2)


def from_pieces(comm: Communicator, device: str = "cpu") -> Trained:
    """In stage 3, with units that half of the ranks gather for their backward."""
    return _train(comm, device, torch.optim.AdamW, reshard_size=comm.size // 2)


def _train(comm: Communicator, device: str, kind: Any, **options: Any) -> Trained:
    net, losses = model().to(device), list[float]()
    engine = ringdp.shard(net, stage=3, comm=comm, **options)
    optimizer = kind(net.parameters(), lr=0.01)
    for step in range(3):
        loss = net(batch(step)[comm.rank :: comm.size].to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with engine.full_parameters():
        parameters = [p.detach().cpu() for p in net.parameters()]
    sent = [engine.sent_bytes()]
    engine.close()
    return Trained(losses, parameters, sent)


def train_clipped(comm: Communicator, device: str = "cpu") -> list[float]:
    """Trains in stage 3 with a scaled loss and clipping. Returns every step's loss and gradient
    norm; all norms exceed the limit."""
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


def all_reduce_on_gpu(comm: Communicator, cases: list[Case]) -> list[bytes]:
    """All-reduces on a GPU; returns digests of the results."""
    out = []
    for case in cases:
        x = input_of(case, comm.rank, comm.size).cuda()
        comm.all_reduce(x, case.op, algorithm=case.algorithm)
        out.append(digest(x.cpu()))
    return out


def replay_captured_all_reduce(comm: Communicator) -> None:
    """Captures an all_reduce in a CUDA graph and replays it."""
    x = torch.full((100_003,), float(comm.rank + 1), device="cuda")
    comm.all_reduce(x.clone())  # allocates what cannot be allocated during a capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.all_reduce(x)
        x.mul_(0.5)
    for times in range(1, 4):
        x.fill_(comm.rank + times)
        graph.replay()
        assert torch.all(x == (2 * times + 1) / 2)
