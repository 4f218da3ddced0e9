"""The engine's contracts: equal bits in all stages, bytes equal to their formulas, and the
gradients of one process within an error bound."""

from __future__ import annotations

import gc
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import Communicator
from ringdp.parallel.state import State
from tests.equal import equal
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

WIDTH, BATCH, STEPS = 37, 12, 4  # an odd width, so parameters cross the borders of shards


class Net(nn.Module):
    """Blocks in a list, a tied weight, a parameter outside all units, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)) for _ in range(3)
        )
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.embed + self.shift
        for block in self.blocks:
            x = x + block(x)
        return x @ self.embed.t()


class Run(NamedTuple):
    losses: list[float]
    gradients: list[list[Tensor]]  # [step][parameter], full
    parameters: list[Tensor]
    memory: Any
    formula: Any
    sent: list[int]  # bytes of each step
    traffic: int


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))


def model(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def full_gradients(comm: Communicator, engine: ringdp.Engine) -> list[Tensor]:
    """Every parameter's full gradient, gathered from the ranks."""
    out = []
    for unit in engine.units:
        full = unit.gradients.reduced
        if unit.stage.number > 0:
            full = torch.empty(unit.plan.padded, dtype=unit.gradients.reduced.dtype)
            comm.all_gather(full, unit.gradients.reduced.clone())
        for e, shape in zip(unit.plan.entries, unit.cut.shapes, strict=True):
            out.append(full[e.offset : e.offset + e.elements].view(shape).clone())
    return out


def train(comm: Communicator, stage: int, optimizer: str = "AdamW", **options: Any) -> Run:
    net = model(seed=comm.rank)  # rank 0's values are broadcast
    engine = ringdp.shard(net, stage=stage, comm=comm, **options)
    try:
        opt = getattr(torch.optim, optimizer)(net.parameters(), lr=0.01)
        losses, gradients, sent = [], [], []
        rows = BATCH // comm.size
        for step in range(STEPS):
            before = engine.sent_bytes()
            opt.zero_grad()
            loss = net(batch(step)[comm.rank * rows :][:rows]).square().mean()
            loss.backward()
            gradients.append(full_gradients(comm, engine))
            opt.step()
            losses.append(loss.item())
            sent.append(engine.sent_bytes() - before)
        memory = engine.memory(opt)
        formula = engine.memory_formula(
            **({} if optimizer == "AdamW" else {"per_element": 0, "per_parameter": 0})
        )
        with engine.full_parameters():
            parameters = [p.detach().clone() for p in net.parameters()]
        return Run(losses, gradients, parameters, memory, formula, sent, engine.traffic_formula())
    finally:
        engine.close()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_stages_agree_bit_for_bit_and_bytes_equal_their_formulas(ranks, n, optimizer):
    runs = {stage: ranks(n)(train, stage, optimizer) for stage in range(4)}
    for stage, run in runs.items():
        for rank in range(n):
            assert run[rank].losses == runs[0][rank].losses, f"stage {stage}, rank {rank}"
            assert equal(run[rank].parameters, runs[0][0].parameters)
            for step in range(STEPS):
                assert equal(run[rank].gradients[step], runs[0][0].gradients[step])
            assert run[rank].memory == run[rank].formula
            assert run[rank].sent == [run[rank].traffic] * STEPS


@pytest.mark.parametrize("limit", [0, 6000, 1 << 20])
def test_bounded_prefetch_changes_no_bit(ranks, limit):
    plain = ranks(2)(train, 3)
    bounded = ranks(2)(train_bounded, 3, limit)
    for a, b in zip(plain, bounded, strict=True):
        assert a.losses == b.losses
        assert b.memory == b.formula
        assert b.sent == [b.traffic] * STEPS
    sends = [bounded[0].sent[0], plain[0].sent[0]]
    # the more may be in flight, the fewer units are gathered twice
    assert sends == sorted(sends, reverse=limit < 1 << 20)


def train_bounded(comm: Communicator, stage: int, limit: int) -> Run:
    return train(comm, stage, prefetch_bytes=limit)


def single_process() -> list[list[Tensor]]:
    """The gradients of the first step in one process, in float64."""
    net = model(0).double()
    net(batch(0).double()).square().mean().backward()
    return [p.grad for p in net.parameters()]


@pytest.mark.parametrize("n", [2, 3])
def test_gradients_are_within_the_error_bound_of_one_process(ranks, n):
    """Compared with float64. A gradient entry is a sum over BATCH rows of products; each of the
    chain's L layers adds relative errors of at most gamma_k, k = WIDTH + BATCH terms, of the sum of
    absolute values, which the largest entry times k bounds."""
    reference = single_process()
    found = ranks(n)(train, 3, "SGD")[0].gradients[0]
    terms, layers = WIDTH + BATCH, 2 * (3 * 3 + 2)
    for mine, exact in zip(found, reference, strict=True):
        bound = layers * terms * 2.0**-24 * exact.abs().max()
        assert (mine.double() - exact).abs().max() <= bound


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_training_loops_with_evaluation_and_changing_order_work(
    comm: Communicator, stage: int
) -> None:
    """zero_grad at each of its three usual places, or by hand, evaluation between steps, and a
    changing order of use."""
    net = model()
    engine = ringdp.shard(net, stage=stage, comm=comm)
    twin = model()
    try:
        ours = torch.optim.SGD(net.parameters(), lr=0.1)
        theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
        for step in range(6):
            if step % 3 == 0:
                ours.zero_grad()
            if step == 4:  # another order of use
                net.blocks = nn.ModuleList(list(net.blocks)[::-1])
                twin.blocks = nn.ModuleList(list(twin.blocks)[::-1])
            loss = net(batch(step)).square().mean()
            if step == 1:
                ours.zero_grad()
            if step == 4:
                for p in net.parameters():
                    del p.grad
            if step % 3 == 2:
                ours.zero_grad(set_to_none=False)
            loss.backward()
            with torch.no_grad():
                assert torch.isfinite(net(batch(99))).all()
            ours.step()
            theirs.zero_grad()
            twin(batch(step)).square().mean().backward()
            theirs.step()
        before = engine.sent_bytes()
        with engine.full_parameters(), torch.no_grad():
            gathered_once = engine.sent_bytes()
            net(batch(7))
            net(batch(8))
            assert engine.sent_bytes() == gathered_once >= before
            # all ranks have the same batch, so the average is each one's own gradient
            for p, q in zip(net.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    finally:
        engine.close()


@on_ranks(2)
def test_stage_3_frees_what_it_gathered(comm: Communicator) -> None:
    """At rest, while block 1 runs, and at rest again."""
    net = model()
    engine = ringdp.shard(net, stage=3, comm=comm)
    seen: list[list[int]] = []

    def look(*_: object) -> None:
        seen.append([u.full.untyped_storage().nbytes() for u in engine.units])

    try:
        look()
        net.blocks[1][1].register_forward_hook(look)
        net(batch(0)).square().mean().backward()
        look()
        assert all(u.state is State.SHARDED for u in engine.units)
        rest, (root, block0, block1, *_), again = seen
        assert not any(rest + again)
        assert root > 0
        assert block0 == 0, "the previous block is freed"
        assert block1 > 0
    finally:
        engine.close()


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_full_parameters_are_freed(comm: Communicator, stage: int) -> None:
    engine = ringdp.shard(model(), stage=stage, comm=comm)
    with engine.full_parameters():
        whole = [weakref.ref(unit.summoned) for unit in engine.units]
    assert [reference() for reference in whole] == [None] * len(engine.units)
    engine.close()


@pytest.mark.parametrize(("stage", "buckets"), [(0, 3), (1, 3), (2, 1)])
@on_ranks(2)
def test_units_with_a_bucket_of_their_own_are_reduced_side_by_side(
    comm: Communicator, stage: int, buckets: int
) -> None:
    """And of other buckets there is never more than one."""
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    engine = ringdp.shard(net, stage=stage, unit=nn.Linear, comm=comm)
    found: list[int] = []
    net[0].weight.register_hook(lambda _: found.append(engine.reducing.under_way()))
    net(batch(0)).square().mean().backward()
    assert found == [buckets * engine.units[1].bytes]
    engine.close()


@on_ranks(2)
def test_an_engine_is_freed_with_its_model(comm: Communicator) -> None:
    """The engine is not closed; torch's global optimizer hooks must not keep it alive."""
    engine = ringdp.shard(net := model(), stage=3, comm=comm)
    optimizer = torch.optim.SGD(net.parameters())
    net(batch(0)).square().mean().backward()
    optimizer.step()
    reference = weakref.ref(engine)
    del engine, net
    gc.collect()
    assert reference() is None
    optimizer.step()
    comm.barrier()


@on_ranks(2)
def test_values_written_by_hand_are_used_by_the_next_forward(comm: Communicator) -> None:
    """The values are written after a forward without a backward."""
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    engine = ringdp.shard(net, stage=3, unit=nn.Linear, comm=comm)
    for step in range(2):
        net(batch(step)).square().mean().backward()
    net(batch(2))
    with torch.no_grad():
        for p in net[-1].parameters():
            p.zero_()
    assert not net(batch(2)).any()
    engine.close()
