"""Checks a run: measured bytes equal the formulas, all stages are equal bit for bit, and the losses
are within a bound, derived from float32, of the single process.

Note [the bound on the loss]
    A sum of k float32 terms, in any order, has a relative error of at most γ_k ≈ k·2^-24
    (Higham 2002, section 4.2). The ranks and the single process add the same terms in other
    orders. The longest sum of a step runs over the tokens of the global batch, k = batch · context:
    in the loss, and in the gradient of every weight; if these are fewer, over the 4·width inputs of
    a block's last matrix product. To first order, a step therefore moves the loss by at most γ_k of
    its size, once by its own sum and once more for each update before it:

        |Δloss_t| ≤ (t + 1) · γ_k · loss_0        t = 0, 1, …

    The bound ignores the shorter sums, and that training may amplify a difference. It is a
    first-order estimate, not a worst case: with a learning rate of 0.01, ten times the default, 120
    right steps exceed it.

    It misses some errors: AdamW divides a gradient by its own size, so gradients that are all twice
    too large move the loss by 2.6e-6 in 40 steps of the default run, 700 times below the bound.
    Gradients rounded to bf16, or with one element lost, stay as far below. Leaving out one rank's
    rows is 40 times above the bound. The engine's tests compare the gradients themselves.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from ringdp.cli import gpt
from ringdp.cli.runs import MEMORY, Record

UNIT_ROUNDOFF = 2.0**-24  # float32, to nearest


def loss_bound(step: int, reference: Record) -> float:
    """See Note [the bound on the loss]."""
    longest = max(reference.tokens_per_step, 4 * gpt.Shape.width)
    return (step + 1) * longest * UNIT_ROUNDOFF * reference.loss[0]


def differences(loss: Sequence[float], reference: Record) -> list[float]:
    """|Δloss| of every step."""
    return [abs(a - b) for a, b in zip(loss, reference.loss, strict=True)]


def equal_bits(runs: Sequence[Record]) -> bool:
    """Whether all losses and all final parameters have the same bits."""
    return all(a.loss == b.loss and a.digest == b.digest for a, b in pairwise(runs))


def complaints(ranks: Sequence[Sequence[Record]], reference: Record | None) -> list[str]:
    """One line for each check that fails. `ranks[r]` holds rank r's runs, one per stage."""
    found = [line for rank, runs in enumerate(ranks) for run in runs for line in _bytes(rank, run)]
    if not all(math.isfinite(loss) for run in ranks[0] for loss in run.loss):
        found.append("a loss is not finite: training diverged")
    if not all(equal_bits(same_stage) for same_stage in zip(*ranks, strict=True)):
        found.append("the ranks of a stage differ from one another in a loss or a parameter")
    found += [line for a, b in pairwise(ranks[0]) for line in _stages(a, b)]
    if reference is not None:
        for run in ranks[0]:
            found += too_far(f"stage {run.stage}", run.loss, reference)
    return found


def _bytes(rank: int, run: Record) -> list[str]:
    pairs = [(f"{key} bytes", run.memory[key], run.memory_formula[key]) for key in MEMORY]
    pairs.append(("bytes sent per step", run.sent, run.sent_formula))
    return [
        f"stage {run.stage}, rank {rank}: {what} measured {measured:,}, formula {formula:,}"
        for what, measured, formula in pairs
        if measured != formula
    ]


def _stages(a: Record, b: Record) -> list[str]:
    if equal_bits((a, b)):
        return []
    steps = [step for step, (x, y) in enumerate(zip(a.loss, b.loss, strict=True)) if x != y]
    where = f"the loss, first at step {steps[0]}" if steps else "a parameter after the last step"
    return [f"stages {a.stage} and {b.stage} differ in {where}"]


def too_far(name: str, loss: Sequence[float], reference: Record) -> list[str]:
    """A line if a loss exceeds Note [the bound on the loss]."""
    for step, difference in enumerate(differences(loss, reference)):
        bound = loss_bound(step, reference)
        if not difference <= bound:  # a NaN is no pass
            return [
                f"{name}: |Δloss| from the single process is {difference:.2e} at step {step}, "
                f"above the float32 bound {bound:.2e}; rounding gets there, too, if a large "
                "--learning-rate amplifies it"
            ]
    return []
