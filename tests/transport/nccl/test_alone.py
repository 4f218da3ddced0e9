"""What the engine does on a GPU with one rank over NCCL, compared with the CPU.

One rank sends nothing, so no second process is needed; but units are gathered ahead and freed on
streams, gradients flattened, unscaled, clipped and offloaded, checkpoints written and read. The
same tests run over the host NCCL on the CPU, where they were developed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import ringdp
from ringdp import Communicator, Offload, Precision
from ringdp.comm import rendezvous
from tests.transport.nccl.faults import needs_host_nccl

pytestmark = pytest.mark.process

WIDTH, ROWS, STEPS = 256, 12, 3
BLOCKS = 3
ROUNDED = 2 * (2 + 4 * BLOCKS)  # results computed one after another in forward and backward
CLIP = 0.1  # below every norm that occurs


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(torch.tanh(self.linear(x)))


class Net(nn.Module):
    """Blocks, and a tied weight in the root unit."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.embed
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.t()


class Row(NamedTuple):
    stage: int
    dtype: torch.dtype
    offload: bool

    @property
    def bound(self) -> float:
        """The relative error of a step's loss and norm, to first order: both devices sum in
        float32, in different orders, and round each result once."""
        sums = 2 * WIDTH * torch.finfo(torch.float32).eps
        return ROUNDED * (sums + torch.finfo(self.dtype).eps)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TABLE = [Row(*row) for row in product(range(4), DTYPES, (False, True)) if row[0] or not row[2]]


def data(step: int, device: str) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)


class Training:
    """Trains one model. float16 is scaled by torch's GradScaler or, with offload, by ours."""

    def __init__(self, comm: Communicator, device: str, row: Row, seed: int = 0) -> None:
        self.device = device
        self.model = Net(seed).to(device)
        self.engine = ringdp.shard(
            self.model,
            stage=row.stage,
            unit=Block,
            comm=comm,
            precision=Precision(param=row.dtype, reduce=torch.float32, output=torch.float32),
            offload=Offload(parameters=row.stage == 3, optimizer=True) if row.offload else None,
        )
        # With a large eps a step depends smoothly on the gradient, however small that is.
        self.optimizer = ringdp.AdamW(self.model.parameters(), lr=0.05, eps=1.0)
        half = row.dtype == torch.float16
        self.ours = ringdp.LossScaler(self.engine, scale=2.0**10 if half else 1.0)
        self.torchs = torch.amp.GradScaler(device, init_scale=2.0**10, enabled=half)
        self.scales_ours = row.offload

    def step(self, number: int) -> list[float]:
        """Returns the loss and the norm before clipping. The first backward accumulates without
        reducing."""
        scaler = self.ours if self.scales_ours else self.torchs
        self.optimizer.zero_grad()
        with self.engine.no_sync():
            scaler.scale(self.loss(number + 100)).backward()
        loss = self.loss(number)
        scaler.scale(loss).backward()
        if self.scales_ours:
            assert self.ours.unscale_()
        else:
            self.torchs.unscale_(self.optimizer)
        norm = ringdp.clip_grad_norm_(self.engine, CLIP)
        assert norm > CLIP
        scaler.step(self.optimizer)
        if not self.scales_ours:
            self.torchs.update()
            assert self.torchs.get_scale() in (1.0, 2.0**10)  # no overflow occurred
        return [loss.item(), norm]

    def loss(self, seed: int) -> Tensor:
        return self.model(data(seed, self.device)).square().mean()


def train_and_resume(comm: Communicator, device: str, row: Row, folder: Path) -> list[float]:
    """Losses and norms of STEPS steps, and of the last one again, from a checkpoint saved before
    it."""
    found = []
    training = Training(comm, device, row)
    for step in range(STEPS):
        if step == STEPS - 1:
            ringdp.save(folder, training.engine, training.optimizer)
        found += training.step(step)
    memory, formula = training.engine.memory(training.optimizer), training.engine.memory_formula()
    # Accumulated gradients fill all buckets at once, which the formula does not include.
    assert memory._replace(buckets=0) == formula._replace(buckets=0)
    training.engine.close()
    again = Training(comm, device, row, seed=1)
    ringdp.load(folder, again.engine, again.optimizer)
    found += again.step(STEPS - 1)
    again.engine.close()
    return found


def train_ddp(comm: Communicator | ProcessGroup, device: str) -> list[float]:
    """The same training with DistributedDataParallel."""
    model = Net(0).to(device)
    ddp = ringdp.DistributedDataParallel(model, process_group=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(data(step + 100, device)).square().mean().backward()
        loss = ddp(data(step, device)).square().mean()
        loss.backward()
        found += [loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))]
        optimizer.step()
    return found


CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(
    scope="module",
    params=[pytest.param("cpu", marks=needs_host_nccl), CUDA],
)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def comms(device: str) -> Iterator[tuple[Communicator, Communicator]]:
    """Two communicators of this process alone: over NCCL on the device, and on the CPU."""
    before = rendezvous._world
    there = ringdp.init(transport="nccl" if device == "cuda" else "nccl-host", timeout=120.0)
    here = ringdp.init(timeout=120.0)
    rendezvous._world = before
    yield there, here
    there.close()
    here.close()


def assert_close(found: list[float], expected: list[float], bound: float) -> None:
    """Each step's bound includes the errors of the steps before it."""
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert abs(one - other) <= bound * (1 + i // 2) * abs(other), (i, found, expected)


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_every_stage_trains_and_resumes_as_on_the_cpu(comms, device, row: Row, tmp_path: Path):
    there, here = comms
    expected = train_and_resume(here, "cpu", row, tmp_path / "here")
    found = train_and_resume(there, device, row, tmp_path / "there")
    assert_close(found, expected, row.bound)
    assert_close(found[-2:], found[-4:-2], row.bound)  # the resumed step


def test_ddp_trains_as_on_the_cpu(comms, device):
    there, here = comms
    bound = Row(0, torch.float32, False).bound
    assert_close(train_ddp(there, device), train_ddp(here, "cpu"), bound)


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_ddp_moves_inputs_to_device_ids(comms, device):
    there, _ = comms
    net = ringdp.DistributedDataParallel(
        Net(0).to(device), process_group=there, device_ids=[0], output_device=0
    )
    assert (net.device_ids, net.output_device) == ([0], 0)
    assert net(data(0, "cpu")).equal(net.module(data(0, device)))


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_fronts_move_the_model_and_its_inputs(comms, device):
    there, _ = comms
    expected = Net(0).to(device)(data(0, device))
    config = {"train_micro_batch_size_per_gpu": ROWS, "zero_optimization": {"stage": 3}}
    made = {"model": Net(0), "config": config, "optimizer": ringdp.AdamW, "comm": there}
    fronts = (
        ringdp.FullyShardedDataParallel(Net(0), there, device_id=0),
        ringdp.FullyShardedDataParallel(Net(0), there),
        ringdp.fully_shard(Net(0), comm=there),
        ringdp.initialize(**made)[0],  # type: ignore[arg-type]
    )
    for model in fronts:
        assert model.engine.device == torch.device("cuda", 0)
        assert torch.equal(model(data(0, "cpu")), expected)
        model.engine.close()


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_a_result_is_ready_on_every_stream_that_waits(comms, device):
    """The output is a strided copy that is written back on a late stream; its memory is reused at
    once."""
    there, _ = comms
    given, out = (
        torch.arange(1 << 20, dtype=torch.float32, device=device),
        torch.zeros(1 << 20, device=device),
    )
    torch.cuda.synchronize()
    late = torch.cuda.Stream()
    work = there.reduce_scatter(out, given, async_op=True)
    with torch.cuda.stream(late):
        torch.cuda._sleep(100_000_000)  # about 50 ms
        work.wait()
    taken = torch.zeros_like(given)
    work.wait()
    assert torch.equal(out, given)
    assert not taken.any()


def test_ddp_trains_over_torchs_own_group(comms, device):
    _, here = comms
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        found = train_ddp(group, device)
        ((transport, made),) = rendezvous._made[group].items()
        assert transport == ("nccl" if device == "cuda" else "shm")
        made.close()
    finally:
        dist.destroy_process_group()
    assert_close(found, train_ddp(here, "cpu"), Row(0, torch.float32, False).bound)
