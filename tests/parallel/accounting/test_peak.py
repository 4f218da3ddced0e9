"""The peak of stages 2 and 3, measured as existing storages, not by the engine's account: besides
shards and activations two gathered units and one bucket of gradients, and the root's weights and
gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ringdp
from ringdp import Communicator
from ringdp.parallel.values.outputs import UnitOutputs
from tests.parallel.small import assert_gradients, batch, net
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

WIDTH, LAYERS = 128, 4  # a unit is far larger than all activations of one row
BLOCK = [torch.float32] * LAYERS
BLOCK_BYTES = 4 * LAYERS * WIDTH * (WIDTH + 1)


class Block(nn.Module):
    def __init__(self, dtypes: Sequence[torch.dtype] = BLOCK) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


class Net(nn.Module):
    """Its root has no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Scaled(Net):
    """Its root is small."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class Tied(Net):
    """Its root is an embedding as large as three blocks, which is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3 * LAYERS * (WIDTH + 1), WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(self.embed(torch.tensor([3])))
        return nn.functional.linear(x, self.embed.weight)


class Uneven(Net):
    """Its first block is as large as three."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(3 * BLOCK), Block(), Block()])


class Mixed(Net):
    """Its first block is two units, the second of them twice as large as the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(BLOCK + [torch.float64] * LAYERS), Block()])


def storages() -> dict[int, int]:
    """Address -> bytes of every storage of floats made since the last gc.freeze()."""
    live = [o for o in gc.get_objects() if isinstance(o, Tensor) and o.is_floating_point()]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in live}


class Found(NamedTuple):
    """Bytes: the most seen in a step beyond those at rest, the formula's, a block's, and the
    root's."""

    most: int
    formula: int
    unit: int
    root: int


def call_after(owner: Any, name: str, look: Callable[[], None]) -> None:
    method = getattr(owner, name)

    def wrapped(*args: Any, **named: Any) -> Any:
        result = method(*args, **named)
        look()
        return result

    setattr(owner, name, wrapped)


def peak(comm: Communicator, kind: type[Net], stage: int, prefetch: int | None) -> Found:
    gc.freeze()  # earlier objects need not be searched, which would take most of the time
    model = kind()
    engine = ringdp.shard(model, stage=stage, unit=Block, prefetch_bytes=prefetch, comm=comm)
    held: dict[int, int] = {}
    seen: list[int] = []

    def look(*_: object) -> None:
        # makes the gradients reachable from Python
        _made = [p.grad for unit in engine.units for p in unit.computed]
        seen.append(sum(n for at, n in storages().items() if at not in held))

    for owner, name in (
        (engine.forwards, "before"),
        (engine.backwards, "reach"),
        (engine.backwards, "gradient_made"),
        (engine.reducing, "start"),
    ):
        call_after(owner, name, look)
    x = torch.ones(1, WIDTH)
    model(x).sum().backward()  # learns the order of units; gradients now exist
    model.zero_grad()
    held = storages()
    seen.clear()
    model(x).sum().backward()
    formula = engine.memory_formula()
    engine.close()
    gc.unfreeze()
    root, unit, *_ = [u.bytes for u in engine.units]
    root, unit = (root, unit) if engine.units[0].parameters else (0, root or unit)
    return Found(max(seen), formula.gathered_peak + formula.buckets, unit, root)


@pytest.mark.parametrize("kind", [Net, Scaled, Tied])
@pytest.mark.parametrize(
    ("stage", "prefetch", "blocks"), [(3, None, 3), (3, 0, 3), (3, 1 << 20, 5), (2, None, 2)]
)
def test_the_peak_equals_the_formula(ranks, kind, stage, prefetch, blocks):
    for most, formula, unit, root in ranks(2)(peak, kind, stage, prefetch):
        roots = 2 if stage == 3 else 1  # its weights and its gradients
        assert formula == roots * root + blocks * unit
        activations = unit // 8  # about 60 rows of 512 bytes; a quarter is one layer's gradient
        assert formula <= most <= formula + activations
        # no root, or one as large as three blocks
        if kind is not Scaled and (stage, prefetch) == (3, None):
            assert formula <= 3 * max(root, unit)


@pytest.mark.parametrize(("kind", "blocks"), [(Uneven, 7), (Mixed, 6)])
def test_the_peak_of_units_of_several_sizes_equals_the_formula(ranks, kind, blocks):
    """The first block's weights and bucket exist at once. Uneven: beside them the next block's
    bucket, in its reduction. Mixed: not, as the second unit's gather has waited for it."""
    for most, formula, *_ in ranks(2)(peak, kind, 3, None):
        assert formula == blocks * BLOCK_BYTES
        assert formula <= most <= formula + BLOCK_BYTES // 8


def peak_over_a_link(_: Communicator) -> Found:
    comm = ringdp.init(link=ringdp.Link(latency=1e-3, bandwidth=1e9))
    found = peak(comm, Net, 3, None)
    comm.close()
    return found


def test_over_a_network_two_buckets_may_be_in_use(ranks):
    for most, formula, unit, _ in ranks(2)(peak_over_a_link):
        assert formula == 4 * unit
        assert formula <= most <= formula + unit // 8


@pytest.mark.parametrize("precision", [None, ringdp.Precision(torch.float64)])
@on_ranks(2)
def test_the_pool_keeps_no_more_memory_than_was_in_use(
    comm: Communicator, precision: ringdp.Precision | None
) -> None:
    """After all units have been made, and after a step."""
    engine = ringdp.shard(Net(), stage=3, unit=Block, precision=precision, comm=comm)

    def kept() -> int:
        return sum(storage.nbytes() for storage in engine.ledger.pool._kept)

    unit = engine.units[1].bytes
    assert kept() <= unit
    engine.model(torch.ones(1, WIDTH)).sum().backward()
    assert kept() <= 2 * unit
    engine.close()


class SkippedError(Exception):
    """Raised and caught by the loop below."""


def peak_of_a_loop(comm: Communicator, raises: bool) -> tuple[int, list[int]]:
    """The peak of gathered bytes in a loop over blocks, one of which raised before; and how many
    outputs its forwards left open."""
    blocks = net()
    engine = ringdp.shard(blocks, stage=3, comm=comm)

    def refuse(*_: object) -> None:
        raise SkippedError

    def forward() -> Tensor:
        x = batch().requires_grad_()
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    handle = blocks[1][1].register_forward_pre_hook(refuse)
    for _ in range(2 if raises else 0):
        with pytest.raises(SkippedError):
            forward()
    handle.remove()
    for _ in range(3):
        engine.ledger.peak.clear()
        forward().sum().backward()
    outputs = [o for o in gc.get_objects() if type(o) is UnitOutputs]
    left = [len(o._since) for o in outputs if o._units[0] in engine.units]
    assert left
    engine.close()
    return engine.ledger.peak["gathered"], left


def test_a_forward_that_raises_leaves_nothing_gathered(ranks):
    for raised, plain in zip(*(ranks(2)(peak_of_a_loop, r) for r in (True, False)), strict=True):
        assert raised == plain
        assert not any(plain[1])


@on_ranks(2)
def test_memory_that_could_not_be_allocated_is_not_counted(comm: Communicator) -> None:
    """Training goes on, as with a smaller batch."""
    model, twin = net(), net()
    engine = ringdp.shard(model, stage=3, unit=1 << 40, comm=comm)  # one unit

    def none_left(*_: object) -> None:
        raise MemoryError

    for owner, name in ((engine.ledger.pool, "fill"), (engine.ledger, "make")):
        setattr(owner, name, none_left)
        with pytest.raises(MemoryError):
            model(batch()).sum().backward()
        delattr(owner, name)
        for one in (model, twin):
            one.zero_grad()
            one(batch()).sum().backward()
        assert_gradients(engine, twin)
        assert engine.ledger.now["gathered"] == engine.ledger.now["buckets"] == 0, name
    engine.close()
