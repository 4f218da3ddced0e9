"""Drawings: the SVG is well-formed and whole, the grid shows every round."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from ringdp.schedule import ALGORITHMS, grid, schedule, svg

by_name = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{a.collective}-{a.name}")


@by_name
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_an_svg_is_well_formed_and_every_arrow_has_its_head(algorithm, n):
    plan = schedule(algorithm.collective, algorithm.name, n)
    text = svg(plan)
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    heads = set(re.findall(r'id="(a\d+)"', text))
    assert set(re.findall(r"url\(#(a\d+)\)", text)) <= heads
    assert all(f"round {r}" in text for r in range(len(plan.rounds)))


@by_name
def test_the_grid_shows_every_round(algorithm):
    plan = schedule(algorithm.collective, algorithm.name, 4)
    text = grid(plan)
    for r, transfers in enumerate(plan.rounds):
        assert f"round {r}" in text
        assert all(str(t) in text for t in transfers[:8])
