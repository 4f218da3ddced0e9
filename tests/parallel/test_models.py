"""Models on the meta device, with LoRA, several dtypes, recurrent layers or weights used
elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import Communicator, Precision, UsageError
from ringdp.parallel.guards.resting import ShardedParam
from tests.parallel.small import within_step
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

BF16 = torch.bfloat16


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Linear(24, 8))


def batch(rank: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))


def values(engine: ringdp.Engine) -> list[float]:
    with engine.full_parameters():
        state = engine.model.state_dict().values()
        return [x for v in state for x in v.detach().flatten().tolist()]


# ---- meta device


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_meta_model_is_initialized_unit_by_unit(comm: Communicator, stage: int) -> None:
    with torch.device("meta"):
        model, twin = net(), net()
    held = list(model.parameters())
    engine = ringdp.shard(model, stage=stage, persist_below=9, comm=comm)
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    first = values(engine)
    assert all(map(torch.isfinite, map(torch.tensor, first)))
    every = torch.empty(comm.size, len(first))
    comm.all_gather(every, torch.tensor(first))
    assert all(torch.equal(every[0], row) for row in every), "every rank has rank 0's values"
    model(batch(comm.rank)).square().mean().backward()
    engine.close()
    fill = ringdp.shard(
        twin,
        stage=stage,
        comm=comm,
        init=lambda m: [t.fill_(2) for t in (*m.parameters(False), *m.buffers(False))],
    )
    assert set(values(fill)) == {2.0}
    fill.close()

    with torch.device("meta"):
        recurrent = nn.Sequential(nn.LSTM(8, 8))
    engine = ringdp.shard(recurrent, stage=stage, comm=comm)
    recurrent(batch(0))[0].sum().backward()
    engine.close()

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, device="meta"))

    with pytest.raises(
        UsageError, match=r"0 \(Bare\); write one, or pass init=, .* param_init_fn="
    ):
        ringdp.shard(nn.Sequential(Bare()), stage=stage, comm=comm)


@on_ranks(1)
def test_what_init_leaves_out_is_nan(comm: Communicator) -> None:
    with torch.device("meta"):
        model = nn.BatchNorm1d(2)
    ringdp.shard(model, stage=3, comm=comm, init=lambda m: [p.fill_(1) for p in m.parameters()])
    assert not model.weight.isnan().any()
    assert model.running_mean.isnan().all()
    assert model.running_var.isnan().all()


class CountedLayer(nn.Linear):
    """Counts how often modules are asked for their parameters."""

    asked = 0

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        CountedLayer.asked += 1
        return super().parameters(recurse)


@on_ranks(1)
def test_the_work_to_fill_a_meta_model_is_linear_in_its_units(comm: Communicator) -> None:
    asked = []
    for layers in (5, 50):
        CountedLayer.asked = 0
        model = nn.Sequential(*(CountedLayer(2, 2, device="meta") for _ in range(layers)))
        ringdp.shard(model, stage=3, comm=comm).close()
        asked.append(CountedLayer.asked)
    assert asked[1] <= 10 * asked[0]


class Stop(Exception):
    pass


@on_ranks(1)
def test_a_meta_model_is_created_on_the_communicators_device(comm: Communicator) -> None:
    """`meta` stands for the device of a communicator over NCCL."""
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    there, seen = torch.device("meta"), list[torch.device]()

    def init(module: nn.Module) -> None:
        seen.extend(p.device for p in module.parameters())
        raise Stop

    for device in (comm.device, there):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Communicator, "device", device)
            with pytest.raises(Stop):
                ringdp.shard(model, stage=0, comm=comm, init=init)
        model.to("meta")
    assert seen == 2 * [torch.device("cpu")] + 2 * [there]


# ---- parameters used elsewhere


@on_ranks(2)
def test_a_parameter_used_outside_its_forward_is_named(comm: Communicator) -> None:
    model = net()
    engine = ringdp.shard(model, stage=3, comm=comm)
    attempts = [
        lambda: sum(p.square().sum() for p in model.parameters()),
        lambda: model(batch(0)).sum() + model[1].weight.norm(),
        lambda: torch.cat([batch(0).flatten(), model[1].weight]),
        lambda: batch(0) @ model[1].weight.view(8, -1),
        lambda: nn.functional.embedding_bag(torch.tensor([[0]]), model[1].weight),
    ]
    names = ("0.weight", "1.weight", "1.weight", "1.weight", "1.weight")
    for attempt, name in zip(attempts, names, strict=True):
        with pytest.raises(UsageError, match=f"{name} is used outside the forward of its unit"):
            attempt()
    with torch.no_grad():  # reading is allowed
        assert sum(p.square().sum() for p in model.parameters()) >= 0
    assert all(type(p) is ShardedParam for p in model.parameters())
    seen = []
    optimizer = torch.optim.SGD(model.parameters())
    model(batch(0)).sum().backward()
    within_step(optimizer, lambda: seen.append(type(model[1].weight)))
    with engine.full_parameters():
        seen.append(type(model[1].weight))
    assert seen == [nn.Parameter, nn.Parameter]
    engine.close()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.out(x + self.embed(x)))


class ReusesEmbedding(nn.Module):
    """As in diffusion transformers: the last layer uses the first block's embedding, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.last = nn.ModuleList([Block(), Block()]), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[1](self.blocks[0](x))
        return self.last(y + self.blocks[0].embed(x))


def train_with_embedding_unit(comm: Communicator, stage: int) -> list[float]:
    model = ReusesEmbedding()
    engine = ringdp.shard(
        model, stage=stage, unit=lambda m: m in (*model.blocks, model.blocks[0].embed), comm=comm
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(batch(comm.rank + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = values(engine)
    engine.close()
    if stage == 3:
        blocks = ringdp.shard(refused := ReusesEmbedding(), stage=3, unit=Block, comm=comm)
        with pytest.raises(UsageError, match=r"blocks\.0\.embed\.weight.* be a unit itself"):
            refused(batch(comm.rank))
        blocks.close()
    return found


def test_a_module_called_inside_and_outside_its_unit_must_be_a_unit(ranks):
    runs = [ranks(2)(train_with_embedding_unit, stage) for stage in (0, 3)]
    assert all(found == runs[0][0] for run in runs for found in run)


# ---- kinds of parameters


class LoRA(nn.Module):
    """A frozen bfloat16 layer with float32 adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).to(BF16).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x.to(BF16)).float() + self.up(self.down(x)))


def train_lora(comm: Communicator, stage: int, prefetch_bytes: int | None = None) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(LoRA(), LoRA())
    engine = ringdp.shard(model, stage=stage, comm=comm, prefetch_bytes=prefetch_bytes)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = ringdp.AdamW(trained, lr=0.1)
    for step in range(3):
        before = engine.sent_bytes()
        model(batch(comm.rank + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert engine.sent_bytes() - before == engine.traffic_formula()
    assert engine.memory(optimizer) == engine.memory_formula()
    frozen = [u for u in engine.units if not u.widths.trainable]
    assert [u.dtypes.compute for u in frozen if u.plan.entries] == [BF16, BF16]
    assert all(u.gradients.reduced.numel() == 0 for u in frozen)
    found = values(engine)
    engine.close()
    return found


def test_adapters_train_in_their_dtype_and_frozen_units_have_no_gradients(ranks):
    runs = [ranks(2)(train_lora, stage) for stage in range(4)]
    assert all(found == runs[0][0] for run in runs for found in run)


@on_ranks(2)
def test_traffic_of_modules_with_several_units_equals_the_formula(comm: Communicator) -> None:
    """The plan knows which of the units that one module frees stay for the first of its
    backward."""
    for limit in range(0, 1024, 64):
        train_lora(comm, 3, limit)


def train_recurrent(comm: Communicator, stage: int) -> list[float]:
    """An LSTM keeps a list of its weights, in which it must find those of the other dtype."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"rnn": nn.LSTM(8, 8, batch_first=True), "out": nn.Linear(8, 1)})
    model.forward = lambda x: model["out"](model["rnn"](x)[0])
    engine = ringdp.shard(
        model, stage=stage, unit=nn.LSTM, precision=Precision(BF16, torch.float32), comm=comm
    )
    optimizer = ringdp.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(batch(comm.rank).view(2, 3, 8)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = values(engine)
    engine.close()
    return found


def test_a_recurrent_layer_computes_in_another_dtype(ranks):
    runs = [ranks(2)(train_recurrent, stage) for stage in (0, 3)]
    assert all(found == runs[0][0] for run in runs for found in run)
