"""What ranks do over a transport whose collectives a device runs: on the host, or on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import ringdp
from ringdp import Communicator
from tests.parallel.test_engine import BATCH, STEPS, batch, model
from tests.transport.test_conformance import Case, digest, given


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
