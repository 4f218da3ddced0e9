"""The norm of all gradients over all ranks, and clipping by it: the same bits in every stage.

    norm = √(Σ over ranks r, in order, of squared_norm of r's shards of all units), in float64

In stage 0 a rank has every shard and adds them in that order by itself. `torch.nn.utils`' own
clipping works as well (see `guards.sliced`), with other bits and one collective per parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ringdp.errors import UsageError
from ringdp.kernels import squared_norm, unscale
from ringdp.parallel.engine import Engine, check_engine
from ringdp.parallel.guards.resting import unguarded
from ringdp.parallel.unit import FlatUnit


def _norm(engine: Engine, units: Sequence[FlatUnit]) -> float:
    """The L2 norm of these units' gradients; a missing one counts as zero. Collective."""
    slices = engine.stage.slices
    count = 1 if slices else engine.shards.size
    shards = [unit.gradients.reduced.view(count, -1) for unit in units]
    sums = torch.stack([squared_norm([s[i] for s in shards]) for i in range(count)]).cpu()
    if slices:
        every = torch.empty(engine.shards.size, dtype=torch.float64, device="cpu")
        engine.shards.all_gather(every, sums)
        sums = every
    total = 0.0
    for squares in sums.tolist():  # from Python 3.12 on, sum() has other bits: it compensates
        total += squares
    return math.sqrt(total) if total >= 0 else total  # NaN stays


def clip_grad_norm_(engine: Engine, max_norm: float) -> float:
    """Scale all gradients so that their L2 norm is at most `max_norm` > 0. Collective.

    Returns the norm before clipping. As torch.nn.utils.clip_grad_norm_, multiplies by
    max_norm / (norm + 1e-6) if that is below 1. Raises UsageError while gradients of no_sync are
    not reduced.
    """
    check_engine("clip_grad_norm_", engine)
    if not max_norm > 0:
        raise UsageError(f"max_norm is {max_norm}; it must be above 0")
    units = _settled(engine)
    norm = _norm(engine, units)
    factor = max_norm / (norm + 1e-6)
    if not factor >= 1:  # NaN too: then all gradients are
        for unit in units:
            # Not all of `reduced`: NaN would stay in its padding, in every norm from then on.
            torch._foreach_mul_(unit.gradients.views(), factor)
    return norm


def unscale_gradients(engine: Engine, scale: float) -> bool:
    """Divide all gradients by `scale`. Returns whether all are finite on all ranks. Collective."""
    units = _settled(engine)
    device = units[0].gradients.reduced.device if units else None
    found = torch.zeros(1, dtype=torch.float32, device=device)
    for unit in units:
        unscale(unit.gradients.reduced, unit.gradients.reduced, found, scale=1 / scale)
    anywhere = found.cpu()
    engine.comm.all_reduce(anywhere, "max")
    return not anywhere.item()


@unguarded
def _settled(engine: Engine) -> list[FlatUnit]:
    """The units that train, after every p.grad has been stored in its unit's gradient memory."""
    engine.check_reduced("gradients are clipped or scaled")
    engine.stepping.undo(again=True)
    units = [u for u in engine.units if u.widths.trainable]
    for unit in units:
        views = unit.gradients.store([p.grad for p in unit.parameters])
        for p, view in zip(unit.parameters, views, strict=True):
            if p.grad is not None and p.grad.data_ptr() != view.data_ptr():
                p.grad = view
    return units
