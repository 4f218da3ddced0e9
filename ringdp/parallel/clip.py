"""The norm of all gradients over all ranks, and clipping by it: the same bits in every stage.

    norm = √(Σ over ranks r, in order, of squared_norm of r's shards of all units), in float64

In stage 0 a rank has every shard and adds them in that order by itself. `torch.nn.utils`' own
clipping is right as well (see `guards.sliced`), in other bits and with a collective for each
parameter.
"""

from __future__ import annotations

import math

import torch

from ringdp.errors import UsageError
from ringdp.kernels import squared_norm, unscale
from ringdp.parallel.engine import Engine, check_engine
from ringdp.parallel.stages import Keep
from ringdp.parallel.unit import FlatUnit


def grad_norm(engine: Engine) -> float:
    """The L2 norm of all gradients. A parameter without a gradient counts as zero. Collective."""
    whole = engine.stage.optimizer is Keep.FULL
    count = engine.comm.size if whole else 1
    shards = [unit.gradients.reduced.view(count, -1) for unit in _settled(engine)]
    sums = torch.stack([squared_norm([s[i] for s in shards]) for i in range(count)]).cpu()
    if not whole:
        every = torch.empty(engine.comm.size, dtype=torch.float64)
        engine.comm.all_gather(every, sums)
        sums = every
    total = 0.0
    for squares in sums.tolist():
        total += squares
    return math.sqrt(total) if total >= 0 else total  # NaN stays


def clip_grad_norm_(engine: Engine, max_norm: float) -> float:
    """Scale all gradients so that their L2 norm is at most `max_norm`, above 0. Collective.

    Returns the norm that it was. As torch.nn.utils.clip_grad_norm_: by max_norm / (norm + 1e-6)
    where that is below 1. Raises UsageError while gradients of no_sync wait.
    """
    check_engine("clip_grad_norm_", engine)
    if not max_norm > 0:
        raise UsageError(f"max_norm is {max_norm}; it must be above 0")
    norm = grad_norm(engine)
    factor = max_norm / (norm + 1e-6)
    if not factor >= 1:  # NaN too: then all gradients are
        for unit in _settled(engine):
            # Not all of `reduced`: NaN would stay in its padding, in every norm from then on.
            torch._foreach_mul_(unit.gradients.views(), factor)
    return norm


def unscale_gradients(engine: Engine, scale: float) -> bool:
    """Divide them by `scale`; whether all on all ranks are finite then. Collective."""
    units = _settled(engine)
    found = torch.zeros(1, device=units[0].gradients.reduced.device if units else None)
    for unit in units:
        unscale(unit.gradients.reduced, unit.gradients.reduced, found, scale=1 / scale)
    anywhere = found.cpu()
    engine.comm.all_reduce(anywhere, "max")
    return not anywhere.item()


def _settled(engine: Engine) -> list[FlatUnit]:
    """Units whose `gradient` is what their `p.grad` are."""
    engine.check_reduced("gradients are clipped or scaled")
    units = [u for u in engine.units if u.widths.trainable]
    for unit in units:
        for p, view in zip(unit.parameters, unit.gradients.views(), strict=True):
            if p.grad is None:
                view.zero_()
            elif p.grad.data_ptr() != view.data_ptr():  # the user has put another one there
                view.copy_(p.grad)
                p.grad = view
    return units
