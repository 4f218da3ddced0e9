"""Published figures of the bytes that a rank holds, beside their own and the engine's formulas.

ZeRO counts 2Ψ for parameters, 2Ψ for gradients and K = 12 bytes per element for the optimizer
(master, momentum, variance). This is the engine's formula for parameters of two bytes at rest, with
12 bytes of state per element. With Precision(param=bfloat16) the engine holds more: it keeps the
optimizer's gradients in the masters' dtype, and in stage 1 also the whole gradients in bfloat16.

DeepSpeed's estimator counts, in stage 2, whole parameters and gradients of two bytes each (4Ψ) and
16Ψ/n with gradients and masters of four bytes; in stage 3, 18Ψ/n and 4 bytes per element of the
largest layer. In stage 2 the engine has two buckets instead of all gradients. In stage 3 it also
keeps 18Ψ/n, but the root, two units and two buckets where DeepSpeed counts one layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ringdp.cli.plan.models import Model, read
from ringdp.cli.plan.stages import RANK, held, sharding
from ringdp.parallel.accounting.formula import formula
from ringdp.parallel.accounting.memory import Memory, Widths
from ringdp.parallel.precision import Precision

ZERO = "Rajbhandari et al. 2020, figure 1: 7.5e9 parameters, 64 ranks, GB"
DEEPSPEED = "DeepSpeed, code-docs/source/memory.rst: t5-3b, 2851e6 parameters, 8 ranks, GiB"
BF16 = Precision(param=torch.bfloat16)
LARGEST_LAYER = 32_000_000  # elements, as in the documentation's example


class Figure(NamedTuple):
    """`published` is as printed there, `theirs` by their formula, `engine` by `ringdp plan`."""

    source: str
    stage: int
    published: float
    theirs: float
    engine: float


def figures() -> list[Figure]:
    zero, t5 = read("params=7.5e9", BF16), read("params=2851e6/89", BF16)
    said = (120, 31.4, 16.6, 1.9)
    found = [
        Figure(ZERO, stage, gb, zeros(zero, stage, 64) / 1e9, at_rest(held(zero, stage, 64)) / 1e9)
        for stage, gb in enumerate(said)
    ]
    psi, n = 2851e6, 8
    for stage, gib, theirs in (
        (2, 15.93, 4 * psi + 16 * psi / n),
        (3, 6.09, 4 * LARGEST_LAYER + 18 * psi / n),
    ):
        found.append(Figure(DEEPSPEED, stage, gib, theirs / 2**30, sum(held(t5, stage, n)) / 2**30))
    return found


def zeros(model: Model, stage: int, ranks: int) -> int:
    """ZeRO's count, computed with the engine's formula."""
    widths = [Widths(2, 2, 2, trainable=w.trainable) for w in model.widths]
    given = sharding(model, stage, ranks)._replace(widths=widths, limit=0)
    return at_rest(formula(given, RANK, per_element=12, per_parameter=0))


def at_rest(found: Memory) -> int:
    """The bytes held between steps, without gathered units and buckets."""
    return found.parameters + found.gradients + found.optimizer
