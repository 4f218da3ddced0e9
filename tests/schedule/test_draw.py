"""Drawings: the SVG is well-formed and legible, and SVG and grid show every round."""

from __future__ import annotations

import re
from colorsys import hls_to_rgb
from math import hypot
from xml.etree import ElementTree

import pytest

from ringdp.schedule import grid, schedule, svg
from ringdp.schedule.draw import colour
from tests.schedule.test_program import by_name


@by_name
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_svgs_are_well_formed_and_define_their_arrow_heads(algorithm, n):
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


def test_labels_are_legible_in_every_chunk_color():
    """They have the contrast to white that WCAG requires of text."""
    for chunk in range(64):
        hue, saturation, lightness = map(int, re.findall(r"\d+", colour(chunk, 64)))
        rgb = hls_to_rgb(hue / 360, lightness / 100, saturation / 100)
        red, green, blue = (
            x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in rgb
        )
        assert 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05) >= 4.5


def test_wide_labels_of_short_arrows_stay_inside_their_panel():
    first = svg(schedule("all_reduce", "hierarchical:4", 16)).split("<g ")[2]
    circle = max(float(y) for y in re.findall(r'cy="([\d.-]+)"', first))
    (middle,) = re.findall(r"translate\(([\d.]+),", first)
    number = r"([\d.-]+)"
    labels = re.findall(rf'<text x="{number}" y="{number}"[^>]*paint-order[^>]*>{number}<', first)
    assert len(labels) == 16
    outside = [(float(x), float(y) - 4, text) for x, y, text in labels]
    outside = [(x, y, text) for x, y, text in outside if hypot(x, y) > circle]
    assert len(outside) == 12  # all but the one that points inwards, in each of four nodes
    for x, y, text in outside:
        assert hypot(x, y) > circle + 15  # the radius of a rank's circle
        assert abs(x) + 7.3 * len(text) / 2 <= float(middle)


def test_in_crowded_rounds_rank_0s_arrows_are_in_front():
    _, exchange, folds, *_ = svg(schedule("all_reduce", "direct", 16)).split(">round ")
    paths = re.findall(r"<path [^>]*marker-end[^>]*>", exchange)
    pale = [path for path in paths if "opacity" in path]
    assert (len(paths), len(pale)) == (16 * 15, 15 * 15)
    assert pale == paths[: len(pale)], "faded arrows are drawn first"
    assert exchange.startswith("0, rank 0's arrows in front<")
    assert "opacity" not in folds, "arrows within a rank are not faded"
