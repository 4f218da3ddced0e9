"""Training loops: every case gives the gradients of one process, the same bits in every stage on
every rank, and leaves nothing gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import Communicator, Offload
from ringdp.parallel.state import State
from tests.parallel.loop_cases import CASES, Batches, Case
from tests.parallel.loop_models import WIDTH

pytestmark = pytest.mark.process


ROWS, STEPS = 5, 3


def batches(case: Case, step: int, rank: int) -> Batches:
    def batch(i: int) -> Tensor:
        seed = torch.Generator().manual_seed(1000 * step + 10 * i + rank)
        return torch.randn(ROWS, WIDTH, generator=seed).to(case.dtype)

    return batch


def model(case: Case, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return case.make()


def optimizer(net: nn.Module) -> torch.optim.Optimizer:
    # Powers of two: in bfloat16, torch's rounding of `p - lr * g` depends on an element's position.
    return torch.optim.SGD(net.parameters(), lr=2**-4, momentum=0.5)


def unchanged(net: nn.Module) -> list[Tensor]:
    """Buffers that training does not write to."""
    return [b for b in net.buffers() if b.dtype in (torch.bool, torch.complex64)]


def train(comm: Communicator, case: Case, stage: int, *, apart: bool = False) -> list[Tensor]:
    """Every parameter after every step. With `apart`, modules compute with other tensors than the
    optimizer steps, as in mixed precision."""
    net = model(case, seed=comm.rank)  # rank 0's values are broadcast
    offload = Offload(parameters=stage == 3, optimizer=True) if apart else None
    engine = ringdp.shard(net, stage=stage, unit=case.unit, offload=offload, comm=comm)
    try:
        opt, out = optimizer(net), []
        for step in range(STEPS):
            opt.zero_grad()
            case.step(net, batches(case, step, comm.rank))
            opt.step()
            at_rest = State.UNSHARDED if stage == 0 else State.SHARDED
            assert all(u.state is at_rest for u in engine.units)
            assert engine.ledger.now["gathered"] == engine.ledger.now["buckets"] == 0
            with engine.full_parameters():
                out += [p.detach().clone() for p in net.parameters()]
        return out + unchanged(net)
    finally:
        engine.close()


def single(case: Case, ranks: int) -> list[Tensor]:
    """The same in one process, with the averaged gradients of all ranks' batches."""
    net = model(case, seed=0)
    opt, out = optimizer(net), []
    for step in range(STEPS):
        total = [torch.zeros_like(p) for p in net.parameters()]
        for rank in range(ranks):
            opt.zero_grad()
            calls = getattr(net, "calls", None)
            case.step(net, batches(case, step, rank))
            if calls is not None and rank < ranks - 1:  # all ranks skip the same blocks
                net.calls = calls
            for t, p in zip(total, net.parameters(), strict=True):
                if p.grad is not None:
                    t += p.grad / ranks
        for t, p in zip(total, net.parameters(), strict=True):
            if p.requires_grad:
                p.grad = t
        opt.step()
        out += [p.detach().clone() for p in net.parameters()]
    return out + unchanged(net)


def all_stages(comm: Communicator, name: str) -> list[list[Any]]:
    """As numbers: every tensor sent through a pipe would take a shared-memory file."""
    case = CASES[name]
    runs = [train(comm, case, stage) for stage in range(4)]
    runs += [train(comm, case, 3, apart=True)] if comm.size == 2 else []
    return [[t.tolist() for t in run] for run in runs]


# With three ranks some parts are cut at both ends, and averages are rounded.
ON_THREE_RANKS = (
    *("chain", "nested units", "tied, micro-batches", "tiny", "one parameter", "unequal"),
    *("unused, micro-batches", "channels last", "float64", "bfloat16", "gradients assigned"),
    *("two forwards, called twice", "checkpoint of all, reentrant=True"),
)


@pytest.mark.parametrize(
    ("name", "n"), [*((name, 2) for name in CASES), *((name, 3) for name in ON_THREE_RANKS)]
)
def test_loops_train_as_in_one_process(ranks, name, n):
    found = ranks(n)(all_stages, name)
    bits = found[0][0]
    for rank, stages in enumerate(found):
        for stage, parameters in enumerate(stages):
            assert parameters == bits, f"run {stage}, rank {rank}"
    # One process adds in another order: up to 3 ranks x 3 parts x ROWS products per gradient, after
    # sums over WIDTH in every layer, about 100 roundings of 2^-24 of values near 1 in each step.
    rtol, atol = (0.05, 0.05) if CASES[name].dtype is torch.bfloat16 else (1e-4, 2e-5)
    for numbers, exact in zip(bits, single(CASES[name], n), strict=True):
        mine = torch.tensor(numbers, dtype=exact.dtype).view_as(exact)
        torch.testing.assert_close(mine, exact, rtol=rtol, atol=atol)
