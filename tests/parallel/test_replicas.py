"""Replicas: with a `shard_size` below the number of ranks, each so many ranks hold a model."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import Communicator, ModelError, Precision, UsageError
from tests.equal import equal
from tests.forks import CALL_TIMEOUT, Forks, Report, die, meet
from tests.parallel import small
from tests.ranks import on_ranks
from tests.transport.device_bodies import from_pieces, in_replicas
from tests.transport.over import over

pytestmark = pytest.mark.process

N, BF16 = 4, torch.bfloat16


def gradients(model: nn.Module, rank: int) -> list[Tensor]:
    """Of a batch of the rank's own, by itself."""
    twin = small.net()
    twin.load_state_dict(model.state_dict())
    small.loss(twin, rank).backward()
    return [p.grad for p in twin.parameters() if p.grad is not None]


def average(each: list[Tensor], dtype: torch.dtype, shard_size: int) -> Tensor:
    """Folds in the order of ranks, of each replica, then in that of replicas, both in float32."""

    def fold(tensors: list[Tensor]) -> Tensor:
        return reduce(torch.add, [t.float() for t in tensors]).to(dtype)

    scaled = [(g * (1 / N)).to(dtype) for g in each]
    return fold([fold(scaled[at : at + shard_size]) for at in range(0, N, shard_size)]).float()


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("shard_size", [1, 2, 4])
@on_ranks(N)
def test_gradients_are_summed_over_a_replica_then_over_replicas(
    comm: Communicator, shard_size: int, dtype: torch.dtype
) -> None:
    alone = zip(*(gradients(small.net(), rank) for rank in range(N)), strict=True)
    exact = [average([*each], dtype, shard_size) for each in alone]
    for stage in (1, 2, 3):
        for overlap in (True, False):
            engine = ringdp.shard(
                small.net(seed=comm.rank and 7),  # all get rank 0's values
                stage=stage,
                precision=Precision(reduce=dtype),
                shard_size=shard_size,
                overlap=overlap,
                comm=comm,
            )
            small.loss(engine.model, comm.rank).backward()
            found: list[Any] = [p.grad for p in engine.model.parameters()]
            assert equal((g.full_tensor() for g in found), exact)
            engine.close()
            assert engine.shards.closed is (shard_size < N)
            assert not comm.closed


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(N)
def test_all_else_is_as_in_one_process(comm: Communicator, stage: int, tmp_path: Path) -> None:
    """Of equal batches, whose average is exact: two kinds of optimizers, accumulation, clipping by
    torch and by ringdp, a scaled loss, norms, the optimizers' state, and a checkpoint."""
    twin, model = small.net(), small.net()
    engine = ringdp.shard(model, stage=stage, shard_size=2, comm=comm)
    scaler, last = ringdp.LossScaler(engine), list[Any]()
    for m in (twin, model):
        optimizers = small.muon_and_adamw(m)
        for seed in range(3):
            m.zero_grad()
            small.loss(m, seed).backward()
            if m is model:
                m.zero_grad()
                with engine.no_sync():
                    scaler.scale(small.loss(m, seed)).backward()
                scaler.scale(0 * small.loss(m, seed)).backward()
                assert scaler.unscale_()
            norm = torch.nn.utils.get_total_norm([p.grad for p in m.parameters()])
            if m is model:
                assert ringdp.clip_grad_norm_(engine, 1e9) == pytest.approx(norm.item())
            for optimizer in optimizers:
                optimizer.step()
        last.append((norm, optimizers))
    (norm, exact), (found, ours) = last
    torch.testing.assert_close(found, norm)
    ringdp.save(tmp_path, engine, ours)
    other = small.net(seed=1)
    alone = ringdp.shard(other, stage=stage, shard_size=1, comm=comm)
    optimizers = small.muon_and_adamw(other)
    ringdp.load(tmp_path, alone, optimizers)
    for one, net, theirs in ((engine, model, ours), (alone, other, optimizers)):
        with one.full_parameters():
            assert equal(net.parameters(), twin.parameters())
            for a, b in zip(exact, theirs, strict=True):
                torch.testing.assert_close(b.state_dict()["state"], a.state_dict()["state"])
        one.close()


@pytest.mark.parametrize("trained", [in_replicas, from_pieces])
def test_gloo_gives_the_bits_of_shared_memory(ranks, trained):
    for here, there in zip(ranks(N)(over, "c10d", trained), ranks(N)(trained), strict=True):
        assert here.losses == there.losses
        assert equal(here.parameters, there.parameters)
        assert here.sent == there.sent


@on_ranks(N)
def test_wrong_sizes_are_refused(comm: Communicator) -> None:
    for size in (0, -1, 3, 8, True):
        with pytest.raises(UsageError, match=rf"shard_size is {size}.*allowed: \[1, 2, 4\]"):
            ringdp.shard(small.net(), stage=3, shard_size=size, comm=comm)
    with pytest.raises(UsageError, match=r"shard_size='2'\): allowed: int or None"):
        ringdp.shard(small.net(), stage=3, shard_size="2", comm=comm)
    with pytest.raises(UsageError, match="shard_size=2 in stage 0, which shards nothing"):
        ringdp.shard(small.net(), stage=0, shard_size=2, comm=comm)
    with pytest.raises(ModelError, match="with shard_size 4 on rank 3"):
        ringdp.shard(small.net(), stage=3, shard_size=4 if comm.rank == 3 else 2, comm=comm)


def last_rank_dies(comm: Communicator, report: Report) -> None:
    comm.set_timeout(CALL_TIMEOUT)
    model = small.net()
    ringdp.shard(model, stage=3, shard_size=2, comm=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    small.step(model, optimizer, 0)
    comm.barrier()
    if comm.rank == N - 1:
        die()
    try:
        small.step(model, optimizer, 1)
    except ringdp.CommunicationError as e:
        report(f"{type(e).__name__}: {e}")
    meet(comm, "survivors", without=N - 1)  # none ends before all have raised


def test_a_rank_that_dies_ends_all_replicas(forks: Forks) -> None:
    """Ranks 1 and 2 wait for it, and rank 0 for them, which go on."""
    ended = forks(N, last_rank_dies)[:-1]
    assert [code for code, _ in ended] == [0, 0, 0]
    texts = [reported[0] for _, reported in ended]
    assert {text.partition(":")[0] for text in texts} == {"PeerLost"}
    assert "rank 1 has ended" in texts[2]  # it gathers from it, before any other rank's error
    assert "ranks here: 0 is 2 of the job, 1 is 3 of the job" in texts[2]
