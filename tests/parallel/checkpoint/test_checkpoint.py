"""Checkpoints saved with some ranks and stage load with any others, bit for bit; a crash during a
save keeps the previous one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn

import ringdp
from ringdp import CheckpointError, Communicator, Precision, UsageError
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

WIDTH = 7


class Net(nn.Module):
    """A tied weight, a 0-dim and a frozen parameter, buffers, and a unit with fewer elements than
    four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH), nn.Linear(7, 7)])
        self.blocks[2].weight.requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(self.norm(x))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def loss(model: nn.Module, step: int) -> Tensor:
    """The same on all ranks, so the number of ranks changes only roundings."""
    tokens = torch.randint(5, (2, 12), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(tokens[0]).float(), tokens[1])


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        value = loss(model, step)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def contents(engine: ringdp.Engine, optimizer: Any) -> dict[str, list[float]]:
    """All parameters, buffers and optimizer state, unsharded."""
    found = {}
    with engine.full_parameters():
        found |= {k: v.flatten().tolist() for k, v in engine.model.state_dict().items()}
    for unit in engine.units:
        for i, (p, e) in enumerate(zip(unit.parameters, unit.plan.entries, strict=True)):
            begin, end = unit.plan.local(e, engine.shards.rank)
            if unit.stage.number == 0:
                begin, end = e.offset, e.offset + e.elements
            for key in ("exp_avg", "exp_avg_sq"):
                full = torch.zeros(unit.plan.padded)
                mine = optimizer.state.get(p, {}).get(key, torch.zeros(p.numel()))
                if unit.stage.number == 0:
                    full[begin:end] = mine.flatten()
                else:
                    shard = torch.zeros(unit.plan.shard)
                    shard[begin:end] = mine
                    engine.shards.all_gather(full, shard)
                value = full[e.offset : e.offset + e.elements]
                found[f"{key} {unit.index} {i} {e.name}"] = value.tolist()
    return {k.split()[-1] + k.split()[0]: v for k, v in found.items()}


def train_and_save(
    comm: Communicator, path: str, stage: int, optimizer: str, shard_size: int | None = None
) -> Any:
    model = net()
    engine = ringdp.shard(model, stage=stage, comm=comm, shard_size=shard_size)
    opt = make_optimizer(optimizer, model)
    train(model, opt, range(3))
    ringdp.save(path, engine, opt, extra={"step": 3})
    held = contents(engine, opt)
    losses = train(model, opt, range(3, 6))
    engine.close()
    return held, losses


def load_and_train(
    comm: Communicator, path: str, stage: int, optimizer: str, shard_size: int | None = None
) -> Any:
    model = net(seed=1 + comm.rank)
    unit, below = nn.Linear, 8
    engine = ringdp.shard(
        model, stage=stage, unit=unit, persist_below=below, comm=comm, shard_size=shard_size
    )
    opt = make_optimizer(optimizer, model, lr=7.0)
    extra = ringdp.load(path, engine, opt)
    assert extra == {"step": 3}
    assert opt.param_groups[0]["lr"] == 0.01
    assert isinstance(opt.param_groups[0]["betas"], tuple)
    held = contents(engine, opt)
    losses = train(model, opt, range(3, 6))
    engine.close()
    return held, losses


def make_optimizer(name: str, model: nn.Module, lr: float = 0.01) -> Any:
    parameters = [p for p in model.parameters() if p.requires_grad]
    library = ringdp if name == "ringdp" else torch.optim
    return library.AdamW(parameters, lr=lr)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_loading_replaces_what_an_earlier_forward_has_gathered(
    comm: Communicator, tmp_path: Path, stage: int
) -> None:
    """A forward without a backward leaves its units gathered."""
    model = net()
    engine = ringdp.shard(model, stage=stage, comm=comm)
    ringdp.save(tmp_path / "checkpoint", engine)
    want = loss(model, 0).item()
    with engine.full_parameters(write=True):
        for p in model.parameters():
            p.data.add_(1)
    assert loss(model, 0).item() != want
    ringdp.load(tmp_path / "checkpoint", engine)
    assert loss(model, 0).item() == want
    engine.close()


@pytest.mark.parametrize(
    ("wrote", "reads"), [((4, 3), [(4, 1), (2, 1), (1, 0), (3, 2)]), ((1, 0), [(4, 3)])]
)
def test_a_checkpoint_loads_with_any_ranks_and_stage(ranks, tmp_path, wrote, reads):
    path = str(tmp_path / "deep" / "checkpoint")
    n, stage = wrote
    held, losses = ranks(n)(train_and_save, path, stage, "ringdp")[0]
    for n, stage in reads:
        optimizer = "torch" if n == 3 else "ringdp"  # both optimizers have the same state
        for found, after in ranks(n)(load_and_train, path, stage, optimizer):
            assert found == held
            assert after == pytest.approx(losses, rel=1e-4)
            if n == wrote[0]:
                assert after == losses, "saving and loading change nothing"
    assert len(list(Path(path).glob("data-*"))) == 1


def test_replicas_write_each_element_once_and_about_as_much(ranks, tmp_path):
    """What they write loads with other replicas, and without."""
    held, losses = ranks(4)(train_and_save, str(tmp_path), 3, "torch", 2)[0]
    files = sorted(tmp_path.glob("data-*/*"))
    sizes = [sum(t.numel() for t in load_file(f).values()) for f in files]
    values = sum(p.numel() * (3 if p.requires_grad else 1) for p in net().parameters())
    steps = sum(p.requires_grad for p in net().parameters())
    assert values <= sum(sizes) - 2 * WIDTH - 1 <= values + 4 * steps
    for one, other in ((0, 2), (1, 3)):  # which have the same shards
        assert abs(sizes[one] - sizes[other]) < 0.1 * sizes[one]
    for n, stage, shard_size in ((4, 2, 1), (4, 1, None), (2, 0, None), (4, 3, 2)):
        for found, after in ranks(n)(load_and_train, str(tmp_path), stage, "ringdp", shard_size):
            assert found == held
            assert after == pytest.approx(losses, rel=1e-4)


@on_ranks(2)
def test_loaded_optimizer_state_has_the_parameters_dtype(
    comm: Communicator, tmp_path: Path
) -> None:
    """State saved in bfloat16 is loaded in float32, and vice versa."""
    for saved, here in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        for dtype, act in ((saved, ringdp.save), (here, ringdp.load)):
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH)).to(dtype)
            engine = ringdp.shard(model, stage=3, comm=comm)
            optimizer = torch.optim.NAdam(model.parameters())
            batch = torch.ones(2, WIDTH, dtype=dtype)
            if act is ringdp.save:
                model(batch).sum().backward()
                optimizer.step()
            act(tmp_path, engine, optimizer)
            model(batch).sum().backward()
            optimizer.step()
            for state in optimizer.state.values():
                assert state["exp_avg"].dtype == dtype
                assert state["mu_product"].dtype == torch.float32
            engine.close()


def export(comm: Communicator, path: str) -> list[float]:
    model = net()
    precision = Precision(torch.bfloat16, torch.float32, keep_fp32=nn.BatchNorm1d)
    engine = ringdp.shard(model, stage=3, precision=precision, comm=comm)
    train(model, ringdp.AdamW(p for p in model.parameters() if p.requires_grad), range(2))
    ringdp.export(path, engine)
    with engine.full_parameters():
        values = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    engine.close()
    return values


def test_a_plain_model_loads_an_export(ranks, tmp_path):
    values = ranks(2)(export, str(tmp_path / "model.safetensors"))[0]
    model = net(seed=5)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.cat([p.detach().flatten() for p in model.parameters()]).tolist() == values
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as `no_dist` asks for
def test_torchs_distributed_checkpoint_reads_the_shards(ranks, tmp_path):
    held, _ = ranks(4)(train_and_save, str(tmp_path), 3, "torch")[0]
    (data,) = tmp_path.glob("data-*")
    parameters = {name: p.numel() for name, p in net().named_parameters()}
    # the frozen one has no state
    moved = {name: n for name, n in parameters.items() if name != "blocks.2.weight"}
    state = {f"parameter/{name}": torch.empty(n) for name, n in parameters.items()}
    state |= {f"optimizer/exp_avg/{name}": torch.empty(n) for name, n in moved.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(data)), no_dist=True)
    for name in parameters:
        assert state[f"parameter/{name}"].tolist() == held[name + name]
    for name in moved:
        assert state[f"optimizer/exp_avg/{name}"].tolist() == held[name + "exp_avg"]


def die_during_save(comm: Communicator, report: Any, path: str, rank: int, at: int) -> None:
    """Saves twice; `rank` is killed at the `at`-th fsync or replace of the second save."""
    model = net()
    engine = ringdp.shard(model, stage=3, comm=comm)
    optimizer = ringdp.AdamW([p for p in model.parameters() if p.requires_grad])
    train(model, optimizer, range(1))
    ringdp.save(path, engine, optimizer, extra={"save": 1})
    train(model, optimizer, range(1))
    calls = 0

    def kill_at_call(real: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if comm.rank == rank and calls == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        return call

    os.fsync, os.replace = kill_at_call(os.fsync), kill_at_call(os.replace)
    try:
        ringdp.save(path, engine, optimizer, extra={"save": 2})
    except ringdp.PeerLost:
        report("lost")


def extra_of(comm: Communicator, path: str) -> Any:
    model = net(seed=3)
    engine = ringdp.shard(model, stage=0, comm=comm)
    optimizer = ringdp.AdamW([p for p in model.parameters() if p.requires_grad])
    extra = ringdp.load(path, engine, optimizer)
    engine.close()
    return extra


@pytest.mark.parametrize(
    ("rank", "at", "left"), [(0, 1, 1), (1, 1, 1), (0, 2, 1), (0, 3, 1), (0, 4, 1), (0, 5, 2)]
)
def test_a_kill_during_a_save_leaves_a_whole_checkpoint(ranks, forks, tmp_path, rank, at, left):
    ended = forks(2, die_during_save, str(tmp_path), rank, at)
    assert ended[rank].code == -signal.SIGKILL
    assert ranks(1)(extra_of, str(tmp_path)) == [{"save": left}]


def export_or_die(comm: Communicator, report: Any, path: str, die_during_save: bool) -> None:
    engine = ringdp.shard(net(), stage=3, comm=comm)
    if die_during_save:
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    ringdp.export(path, engine)


def test_an_export_removes_the_files_of_a_killed_one(forks, tmp_path):
    path = str(tmp_path / "model.safetensors")
    forks(1, export_or_die, path, True)
    assert os.listdir(tmp_path) == [".model.safetensors.ringdp"]
    (tmp_path / ".model.safetensors.ringdp" / ".tmp123").touch()  # a temporary file of safetensors
    forks(1, export_or_die, path, False)
    assert os.listdir(tmp_path) == ["model.safetensors"]


@on_ranks(2)
def test_errors_of_save_and_load_say_what_is_wrong(comm: Communicator, tmp_path: Path) -> None:
    model = net()
    engine = ringdp.shard(model, stage=3, comm=comm)
    optimizer = ringdp.AdamW([p for p in model.parameters() if p.requires_grad])
    other = ringdp.shard(nn.Linear(2, 2), stage=3, comm=comm)
    ringdp.save(tmp_path, engine)
    blocked = tmp_path / "file"
    blocked.touch()
    groups = ringdp.AdamW([{"params": [p]} for p in model.parameters()])
    for attempt, message in (
        (lambda: ringdp.load(tmp_path / "nothing", engine), "holds no checkpoint"),
        (
            lambda: ringdp.load(tmp_path, other),
            "has parameter/embed.weight, which the model has not",
        ),
        (lambda: ringdp.load(tmp_path, engine, optimizer), "without an optimizer"),
        (
            lambda: (
                ringdp.save(tmp_path, engine, groups) or ringdp.load(tmp_path, engine, optimizer)
            ),
            "parameter groups",
        ),
        (lambda: ringdp.save(tmp_path, other, optimizer), "not of the sharded model"),
        (lambda: ringdp.save(tmp_path, engine, extra={"x": object()}), "not JSON"),
        (
            lambda: ringdp.save(tmp_path, engine, extra={"best": [{1: 0.5}]}),
            "keys must be strings, and 1 of best is none",
        ),
        (lambda: ringdp.save(blocked / "below", engine), "was not written; ranks 0, 1: "),
    ):
        with pytest.raises(CheckpointError, match=message):
            attempt()
    rate: Any = torch.optim.lr_scheduler.ConstantLR(optimizer)
    for function in (ringdp.save, ringdp.load):
        with pytest.raises(UsageError, match="optimizer is a ConstantLR; allowed: "):
            function(tmp_path, engine, rate)
    for wrapped in (optimizer, [optimizer]):  # as by timm's Lookahead, and by lists of torchtitan's
        wrapper: Any = torch.optim.SGD(model.parameters())
        wrapper.base = wrapped
        for function in (ringdp.save, ringdp.load):
            with pytest.raises(UsageError, match=r"the SGD wraps .* give its \.base instead"):
                function(tmp_path, engine, wrapper)
    wrapper.state = optimizer.state  # as in accelerate's wrapper
    ringdp.save(tmp_path, engine, wrapper)
    with engine.full_parameters():
        engine.close()
    for function in (ringdp.save, ringdp.load):
        with pytest.raises(UsageError, match=r"the engine was closed within .* an ordinary one"):
            function(tmp_path, engine)
    other.close()
