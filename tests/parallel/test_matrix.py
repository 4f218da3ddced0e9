"""DDP and stages 1 to 3 agree bit for bit, and bytes equal their formulas, over ranks x overlap x
bucket sizes x accumulation x clipping x precision: every pair of values is in some row of the
table. With replicas, which round differently, stages 1 to 3 agree."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import combinations, product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import Communicator, Offload, Precision
from tests.equal import equal

pytestmark = pytest.mark.process

WIDTH, ROWS, STEPS = 21, 4, 3
BF16 = torch.bfloat16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A tied weight around blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.embed.weight)


class Row(NamedTuple):
    """A combination of settings; `unit` (a layer, a block, the whole model) sets the bucket
    size."""

    ranks: int
    overlap: bool
    unit: Any
    micro: int
    no_sync: bool
    clip: float | None
    precision: Precision
    persist_below: int = 0
    offload: bool = False
    keep: Any = None
    shard_size: int | None = None
    reshard_size: int | None = None


LAYER, BLOCK, WHOLE = (nn.Linear, nn.LayerNorm), Block, 10**9
FLOAT, MIXED = Precision(), Precision(param=BF16, reduce=torch.float32)
NORMS = Precision(param=BF16, keep_fp32=nn.LayerNorm, output=torch.float32)

TABLE = [
    Row(3, True, LAYER, 3, True, None, FLOAT, offload=True, keep=nn.LayerNorm),
    Row(2, False, LAYER, 2, False, 0.1, NORMS, 22),
    Row(4, True, WHOLE, 3, True, 0.1, NORMS, offload=True),
    Row(2, False, WHOLE, 1, False, 0.1, FLOAT),
    Row(3, True, WHOLE, 2, False, None, MIXED),
    Row(2, False, BLOCK, 3, True, 0.1, MIXED, offload=True),
    Row(4, True, BLOCK, 2, True, 0.1, FLOAT, 22, keep=Block),
    Row(4, False, LAYER, 1, False, None, MIXED, keep=nn.Linear),
    Row(3, True, BLOCK, 1, False, None, NORMS),
    Row(2, True, BLOCK, 2, False, None, Precision(param=torch.float16), 22),
    Row(3, False, WHOLE, 2, False, 0.1, Precision(reduce=BF16)),
    Row(4, True, BLOCK, 2, True, 0.1, MIXED, 22, shard_size=2),
    Row(4, False, LAYER, 1, False, None, FLOAT, offload=True, shard_size=2),
    Row(4, True, LAYER, 1, False, 0.1, Precision(reduce=BF16), keep=nn.Linear, shard_size=1),
    Row(4, True, BLOCK, 2, False, None, MIXED, 22, reshard_size=2),
    Row(4, False, LAYER, 2, True, 0.1, FLOAT, offload=True, keep=nn.LayerNorm, reshard_size=2),
    Row(4, True, LAYER, 1, False, None, NORMS, reshard_size=1),
]


def test_every_pair_of_values_is_in_some_row() -> None:
    """Of precisions, those of more than one row."""
    values = {k: {getattr(row, k) for row in TABLE} for k in ("ranks", "overlap", "unit", "micro")}
    values |= {"clip": {None, 0.1}, "precision": {FLOAT, MIXED, NORMS}}
    for a, b in combinations(values, 2):
        pairs = {(getattr(row, a), getattr(row, b)) for row in TABLE}
        assert pairs >= {*product(values[a], values[b])}, (a, b)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def loss(model: nn.Module, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(13, (ROWS, 6), generator=draw)
    out: Tensor = model(tokens[:, :-1])
    return nn.functional.cross_entropy(out.float().flatten(0, 1), tokens[:, 1:].flatten())


class Outcome(NamedTuple):
    losses: list[float]
    norms: list[float]
    parameters: list[Tensor]
    memory: Any
    formula: Any
    sent: int
    traffic: int


def train(comm: Communicator, row: Row, stage: int) -> Outcome:
    model = net()
    engine = ringdp.shard(
        model,
        stage=stage,
        unit=row.unit,
        precision=row.precision,
        overlap=row.overlap,
        persist_below=row.persist_below,
        keep=row.keep,
        offload=Offload(parameters=stage == 3, optimizer=True) if row.offload and stage else None,
        shard_size=row.shard_size,
        reshard_size=row.reshard_size if stage == 3 else None,
        comm=comm,
    )
    try:
        optimizer = ringdp.AdamW(model.parameters(), lr=0.01)
        losses, norms, sent = [], [], 0
        for step in range(STEPS):
            optimizer.zero_grad()
            for i in range(row.micro):
                before = engine.sent_bytes()
                value = loss(model, 100 * step + 10 * i + comm.rank) / row.micro
                if row.no_sync and i < row.micro - 1:
                    with engine.no_sync():
                        value.backward()
                else:
                    value.backward()
                    sent = engine.sent_bytes() - before
                losses.append(value.item())
            if row.clip:
                norms.append(ringdp.clip_grad_norm_(engine, row.clip))
            optimizer.step()
        memory, formula = engine.memory(optimizer), engine.memory_formula()
        with engine.full_parameters():
            parameters = [p.detach().clone() for p in model.parameters()]
        return Outcome(losses, norms, parameters, memory, formula, sent, engine.traffic_formula())
    finally:
        engine.close()


def all_stages(comm: Communicator, index: int) -> list[Outcome]:
    first = 1 if TABLE[index].shard_size else 0
    return [train(comm, TABLE[index], stage) for stage in range(first, 4)]


@pytest.mark.parametrize("index", range(len(TABLE)))
def test_stages_agree_and_bytes_equal_their_formulas(ranks, index):
    row = TABLE[index]
    outcomes = ranks(row.ranks)(all_stages, index)
    for rank, stages in enumerate(outcomes):
        for stage, run in enumerate(stages):
            where = f"stage {stage + 4 - len(stages)}, rank {rank}"
            assert run.losses == outcomes[rank][0].losses, where
            assert run.norms == outcomes[0][0].norms, where
            for a, b in zip(run.parameters, outcomes[0][0].parameters, strict=True):
                assert a.dtype == torch.float32
                assert torch.equal(a, b), where
            assert run.sent == run.traffic, where
            parts = [k for k in run.memory._fields if row.micro == 1 or k != "buckets"]
            for key in parts:
                assert getattr(run.memory, key) == getattr(run.formula, key), f"{where}: {key}"


def ddp(comm: Communicator, row: Row) -> tuple[list[float], list[Tensor]]:
    model = ringdp.DistributedDataParallel(net(), process_group=comm)
    optimizer = ringdp.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for i in range(row.micro):
            with model.no_sync() if i < row.micro - 1 else nullcontext():
                value = loss(model, 100 * step + 10 * i + comm.rank) / row.micro
                value.backward()
            losses.append(value.item())
        optimizer.step()
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_ddp_gives_the_bits_of_stage_3(ranks, n):
    row = Row(n, True, BLOCK, 3, True, None, FLOAT)
    stage_3 = ranks(n)(train, row, 3)
    for found, (losses, parameters) in zip(stage_3, ranks(n)(ddp, row), strict=True):
        assert losses == found.losses
        assert equal(parameters, found.parameters)
