"""With a `reshard_size`, units are gathered for their backward from pieces that fewer ranks keep.

That bits and bytes are those of the formulas, test_matrix shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ringdp
from ringdp import Communicator, Engine, ModelError, Offload, Precision, UsageError
from tests.equal import equal
from tests.forks import CALL_TIMEOUT, Forks, Report, die, meet
from tests.parallel import small
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

N = 4


def sharded(comm: Communicator, model: nn.Module | None = None, **options: Any) -> Engine:
    options = {"stage": 3, "reshard_size": 2, "prefetch_bytes": 0} | options
    return ringdp.shard(model or small.net(), comm=comm, **options)


def pieces(engine: Engine) -> list[int]:
    """Which units have one."""
    return [unit.index for unit in engine.units if unit.piece.kept is not None]


def gathers_of(engine: Engine) -> tuple[Callable[[], tuple[int, int]], int]:
    """Bytes sent since the last call, for gathers from all ranks' shards and from pieces; and how
    many bytes a block has."""
    near = engine.ledger.ranks.near
    assert near is not None
    counts = engine.gathering.comm.sent_bytes, near.sent_bytes
    last = [count() for count in counts]

    def since() -> tuple[int, int]:
        before, last[:] = [*last], [count() for count in counts]
        return last[0] - before[0], last[1] - before[1]

    return since, engine.units[1].bytes


@on_ranks(N)
def test_pieces_are_kept_from_forward_to_the_end_of_backward(comm: Communicator) -> None:
    engine = sharded(comm)
    model, ledger = engine.model, engine.ledger
    since, size = gathers_of(engine)
    everywhere, near = 3 * 3 * size // N, 3 * size // 2  # of all three blocks
    at_rest = ledger.now["gathered"]
    for _ in range(2):
        loss = small.loss(model)
        assert pieces(engine) == [1, 2, 3]
        assert ledger.now["gathered"] - at_rest == 3 * size // 2
        assert since() == (everywhere, 0)
        loss.backward()
        assert pieces(engine) == []
        assert ledger.now["gathered"] == at_rest
        assert since() == (0, near)
        with torch.no_grad():  # no backward follows
            small.loss(model)
        assert pieces(engine) == []
        assert since() == (everywhere, 0)
    small.loss(model)
    with engine.full_parameters():
        assert pieces(engine) == []
    small.loss(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert pieces(engine) == []
    engine.close()


@small.with_and_without_precision
@on_ranks(N)
def test_what_was_assigned_since_the_forward_is_gathered_from_all(
    comm: Communicator, precision: Precision | None
) -> None:
    """As without a reshard_size."""
    found = []
    for size in (2, N):
        engine = sharded(comm, reshard_size=size, precision=precision)
        loss = small.loss(engine.model)
        for p in engine.model[1].parameters():
            p.data = p.data * 2
        if size == 2:
            since, block = gathers_of(engine)
        loss.backward()
        if size == 2:
            assert since() == (3 * block // N, block)  # of the second block, and of both others
        found.append([p.grad for p in engine.model.parameters()])
        engine.close()
    assert equal(*found)


class Retries(nn.Module):
    """Calls its first unit again where that wrote to its weights, which are copies."""

    def __init__(self) -> None:
        super().__init__()
        self.units, self.writes = nn.ModuleList(small.net()), True
        self.units[0].register_forward_pre_hook(self.write)

    def write(self, unit: Any, _: object) -> None:
        if self.writes:
            with torch.no_grad():
                unit[0].weight.mul_(2)

    def forward(self, x: Tensor) -> Any:
        self.writes = True
        with pytest.raises(UsageError, match="written to while its unit computes"):
            self.units[0](x)
        self.writes = False
        for unit in self.units:
            x = unit(x)
        return x


@small.with_and_without_precision
@on_ranks(N)
def test_what_was_written_to_copies_is_in_no_piece(
    comm: Communicator, precision: Precision | None
) -> None:
    found = []
    for size in (2, N):
        model = Retries()
        engine = sharded(comm, model, reshard_size=size, precision=precision)
        loss = small.loss(model)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
        engine.close()
    assert equal(*found)


@on_ranks(N)
def test_a_forward_has_the_weights_of_its_own_time(comm: Communicator) -> None:
    """Also after one without a backward, and after writes that torch does not count."""
    found = []
    for size in (2, N):
        engine = sharded(comm, reshard_size=size)
        small.loss(engine.model)
        for p in engine.model.parameters():
            p.data.mul_(2)
        found.append([small.loss(engine.model).detach()])
        engine.close()
    assert equal(*found)


class Odd(nn.Module):
    """Calls a unit twice, checkpoints two others, and leaves one out at times."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.units, self.calls = nn.ModuleList(small.net()), 0
        self.units.append(nn.Linear(small.WIDTH, small.WIDTH))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        twice, first, second, often = self.units
        x = twice(x)
        for unit in (first, second):
            x = checkpoint(unit, x, use_reentrant=self.reentrant)
        x = twice(x)
        return often(x) if self.calls % 3 else x


@pytest.mark.parametrize("offload", [None, Offload(parameters=True, optimizer=True)])
@pytest.mark.parametrize("prefetch_bytes", [0, None, 1000])
@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(N)
def test_odd_models_have_the_same_bits(
    comm: Communicator, reentrant: bool, prefetch_bytes: int | None, offload: Offload | None
) -> None:
    """Also over two forwards before a backward (which reentrant checkpointing does not allow), and
    forwards that raise or have no backward."""
    found = []
    for size in (2, N):
        torch.manual_seed(0)
        model = Odd(reentrant=reentrant)
        engine = sharded(
            comm, model, reshard_size=size, prefetch_bytes=prefetch_bytes, offload=offload
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses, at_rest = [], engine.ledger.now["gathered"]
        for seed in range(4):
            loss = small.loss(model, seed + comm.rank)
            if not reentrant:
                loss = loss + small.loss(model, seed)
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                model(torch.ones(1, 1))
            with torch.no_grad():
                losses.append(small.loss(model, seed + 1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found.append([*losses, *small.whole_parameters(engine)])
        assert pieces(engine) == []
        assert engine.ledger.now["gathered"] == at_rest
        engine.close()
    assert equal(*found)


@on_ranks(N)
def test_wrong_sizes_are_refused(comm: Communicator) -> None:
    for size in (0, -1, 3, 8, True):
        with pytest.raises(UsageError, match=rf"reshard_size is {size}.*allowed: \[1, 2, 4\]"):
            sharded(comm, reshard_size=size)
    with pytest.raises(UsageError, match=r"reshard_size is 4, over 2 ranks; allowed: \[1, 2\]"):
        sharded(comm, shard_size=2, reshard_size=4)
    with pytest.raises(UsageError, match=r"reshard_size='2'\): allowed: int or None"):
        sharded(comm, reshard_size="2")
    for stage in (0, 1, 2):
        with pytest.raises(UsageError, match=f"reshard_size=2 in stage {stage}, which frees no"):
            sharded(comm, stage=stage)
    with pytest.raises(ModelError, match="with reshard_size 4 on rank 3"):
        sharded(comm, reshard_size=4 if comm.rank == 3 else 2)


def last_rank_dies(comm: Communicator, report: Report) -> None:
    comm.set_timeout(CALL_TIMEOUT)
    engine = sharded(comm)
    loss = small.loss(engine.model)
    comm.barrier()
    if comm.rank == N - 1:
        die()
    with pytest.raises(ringdp.CommunicationError) as caught:
        loss.backward()
    report(f"{caught.typename}: {caught.value}")
    meet(comm, "survivors", without=N - 1)  # none ends before all have raised


def test_a_rank_that_dies_before_backward_ends_all(forks: Forks) -> None:
    """Rank 2 gathers from it, and ranks 0 and 1 wait for both, to reduce."""
    ended = forks(N, last_rank_dies)[:-1]
    assert [code for code, _ in ended] == [0, 0, 0]
    texts = [reported[0] for _, reported in ended]
    assert {text.partition(":")[0] for text in texts} == {"PeerLost"}
    assert "ranks here: 0 is 2 of the job, 1 is 3 of the job" in texts[2]
