"""torch's tensor, pipeline and context parallelism and its checkpoints work over the backend."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _cp_options,
    _templated_ring_attention,
    _templated_ring_attention_backward,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ringdp import Communicator
from tests.comm.backend.jobs import world
from tests.forks import Report
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

WIDTH = 8


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = (
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Linear(4 * WIDTH, WIDTH),
    )
    return nn.Sequential(*layers).double()


@on_ranks(2, pool="forked")
def test_tensor_and_sequence_parallel(comm: Communicator) -> None:
    with world(comm, "ringdp"):
        mesh = init_device_mesh("cpu", (comm.size,))
        alone, net = mlp(), mlp()
        plan = {
            "0": SequenceParallel(),
            "1": ColwiseParallel(input_layouts=Shard(1)),
            "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(net, mesh, plan)
        rows = torch.randn(2, 4 * comm.size, WIDTH, dtype=torch.float64)  # [batch, time, width]
        out = net(distribute_tensor(rows, mesh, [Shard(1)]))
        expected = alone(rows)
        torch.testing.assert_close(out.full_tensor(), expected)
        out.square().sum().backward()
        expected.square().sum().backward()
        for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
            assert isinstance(ours.grad, DTensor)
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
        whole = sum(p.numel() for p in alone.parameters())
        assert sum(p.to_local().numel() for p in net.parameters()) < whole


@on_ranks(2, pool="forked")
def test_pipeline_parallel(comm: Communicator) -> None:
    stages, batches = comm.size, 4
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)]
    whole = copy.deepcopy(nn.Sequential(*layers))
    rows, targets = torch.randn(2, batches * 3, WIDTH)
    with world(comm, "ringdp"):
        stage = PipelineStage(layers[comm.rank], comm.rank, stages, torch.device("cpu"))
        schedule = Schedule1F1B(stage, batches, loss_fn=F.mse_loss)
        losses: list[Tensor] = []
        if comm.rank == 0:
            schedule.step(rows)
        else:
            last = comm.rank == stages - 1
            given = {"target": targets, "losses": losses} if last else {}
            schedule.step(**given)
    expected = []
    for x, y in zip(rows.chunk(batches), targets.chunk(batches), strict=True):
        expected.append(F.mse_loss(whole(x), y))
        (expected[-1] / batches).backward()
    for ours, theirs in zip(
        layers[comm.rank].parameters(), whole[comm.rank].parameters(), strict=True
    ):
        torch.testing.assert_close(ours.grad, theirs.grad)
    if comm.rank == stages - 1:
        assert [loss.item() for loss in losses] == [loss.item() for loss in expected]


class RingAttention(torch.autograd.Function):
    """torch's ring attention with the CPU's attention kernel, which its context manager does not
    support."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        given = query, key, value
        out, sums = _templated_ring_attention(
            dist.group.WORLD, 2, attention, *given, is_causal=True
        )
        ctx.save_for_backward(*given, out, sums)
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return _templated_ring_attention_backward(
            dist.group.WORLD, 2, attention, gradient, "grad_out", query, key, value, out, sums,
            is_causal=True, dropout_p=0.0,
        )  # fmt: skip


@on_ranks(2, pool="forked")
def test_context_parallel(comm: Communicator) -> None:
    _cp_options.enable_load_balance = False
    shape = 2, 2, 8 * comm.size, 4  # [batch, heads, time, width]
    torch.manual_seed(0)
    whole = [torch.randn(shape).requires_grad_() for _ in range(3)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True)
    expected.square().sum().backward()
    with world(comm, "ringdp"):
        mesh = init_device_mesh("cpu", (comm.size,))
        mine = [x.detach().clone() for x in whole]
        with context_parallel(mesh, buffers=mine, buffer_seq_dims=[2] * 3):
            parts = [x.clone().requires_grad_() for x in mine]
            out = RingAttention.apply(*parts)
            out.square().sum().backward()
        assert out.shape[2] == 8
        torch.testing.assert_close(out, expected.chunk(comm.size, 2)[comm.rank])
        for part, full in zip(parts, whole, strict=True):
            torch.testing.assert_close(part.grad, full.grad.chunk(comm.size, 2)[comm.rank])


def train_one_step(comm: Communicator, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After one step of AdamW on a model sharded over the group."""
    net = fully_shard(mlp(seed), mesh=init_device_mesh("cpu", (comm.size,)))
    optimizer = torch.optim.AdamW(net.parameters())
    torch.manual_seed(7)
    net(torch.randn(4, WIDTH, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    return net, optimizer


def values(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[float]]:
    tensors = [*net.parameters()]
    tensors += [
        state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")
    ]
    return [t.full_tensor().flatten().tolist() for t in tensors]


def save(comm: Communicator, report: Report, path: str) -> None:
    with world(comm, "ringdp"):
        net, optimizer = train_one_step(comm, seed=1)
        model, state = get_state_dict(net, optimizer)
        checkpoint.save({"model": model, "optimizer": state}, checkpoint_id=path)
        report(values(net, optimizer))


def load(comm: Communicator, report: Report, path: str) -> None:
    with world(comm, "ringdp"):
        net, optimizer = train_one_step(comm, seed=2)
        model, state = get_state_dict(net, optimizer)
        checkpoint.load({"model": model, "optimizer": state}, checkpoint_id=path)
        set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=state)
        report(values(net, optimizer))


def test_a_checkpoint_of_4_ranks_is_loaded_by_2(forks, tmp_path: Path):
    saved = [ended.reported for ended in forks(4, save, str(tmp_path))]
    loaded = [ended.reported for ended in forks(2, load, str(tmp_path))]
    assert saved[0][0]
    assert saved == [saved[0]] * 4
    assert loaded == [saved[0]] * 2
