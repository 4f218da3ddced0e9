"""The checks after a run of `ringdp train`: each one has a run that breaks it, and a message."""

import math
from dataclasses import replace

import pytest

from ringdp.cli.runs import Record
from ringdp.cli.verdict import complaints, loss_bound
from tests.cli.rows import MEMORY, REFERENCE, STAGE_0, STAGES

STAGE_3 = STAGES[3]
BROKEN = {
    "memory": (replace(STAGE_3, memory={**MEMORY, "gradients": 1}), "gradients bytes measured 1"),
    "traffic": (replace(STAGE_3, sent=7), "bytes sent per step measured 7, formula 12,390,912"),
    "last bit": (
        replace(STAGE_3, loss=(5.5, math.nextafter(4.0, 5), 2.5)),
        "stages 0 and 3 differ in the loss, first at step 1",
    ),
    "parameter": (replace(STAGE_3, digest="e"), "differ in a parameter after the last step"),
    "far": (replace(STAGE_3, loss=(5.5, 4.1, 2.5)), "if a large --learning-rate amplifies it"),
    "nan": (replace(STAGE_3, loss=(5.5, math.nan, 2.5)), "a loss is not finite"),
}


def test_correct_runs_have_no_complaints() -> None:
    assert complaints([STAGES, STAGES], REFERENCE) == []


@pytest.mark.parametrize(("broken", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_check_is_named(broken: Record, message: str) -> None:
    runs = [STAGE_0, broken]
    assert any(message in line for line in complaints([runs, runs], REFERENCE))


def test_every_ranks_formula_is_checked() -> None:
    lines = complaints([[STAGE_3], [replace(STAGE_3, sent=7)]], None)
    assert lines == ["stage 3, rank 1: bytes sent per step measured 7, formula 12,390,912"]


def test_ranks_that_differ_are_named() -> None:
    [line] = complaints([[STAGE_3], [replace(STAGE_3, digest="e")]], None)
    assert "ranks of a stage differ" in line


def test_the_bound_grows_with_the_steps_and_the_tokens() -> None:
    assert loss_bound(0, REFERENCE) == 1024 * 2.0**-24 * 5.5
    more = replace(REFERENCE, tokens_per_step=2048)
    assert loss_bound(9, more) == 20 * loss_bound(0, REFERENCE)


def test_few_tokens_are_not_the_longest_sum() -> None:
    """A right run over 2 bytes differed by 4.3e-6 in its second step."""
    few, more = (replace(REFERENCE, tokens_per_step=tokens) for tokens in (2, 512))
    assert loss_bound(1, few) == loss_bound(1, more) > 4.3e-6
