"""Stages and defaults."""

import pytest

from ringdp.cli.options import Options, check, default_batch, parse_stages


@pytest.mark.parametrize(
    ("given", "stages"),
    [("all", (0, 1, 2, 3)), ("3", (3,)), ("0,3", (0, 3)), ("3, 1,3", (3, 1))],
)
def test_stages(given: str, stages: tuple[int, ...]) -> None:
    assert parse_stages(given) == stages


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 16, 17, 64])
def test_the_default_batch_suits_every_number_of_ranks(ranks: int) -> None:
    check(Options(ranks=ranks, batch=default_batch(ranks)))
    assert default_batch(ranks) >= 16
