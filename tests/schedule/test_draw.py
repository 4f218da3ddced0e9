"""Drawings say every transfer, fit their space, and are well-formed."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from ringdp.errors import ScheduleError
from ringdp.schedule import ALGORITHMS, Schedule, Transfer, grid, schedule, svg, verify
from ringdp.schedule.draw import ranges

SVG = "{http://www.w3.org/2000/svg}"
EVERY = [(a.collective, a.name, n) for a in ALGORITHMS for n in (1, 2, 4, 8)]


@pytest.mark.parametrize(("collective", "name", "n"), EVERY)
def test_the_grid_fits_80_columns_and_says_every_transfer(collective, name, n):
    drawn = schedule(collective, name, n)
    text = grid(drawn)
    assert all(len(line) <= 80 for line in text.splitlines())
    said = re.findall(r"(\d+)\.(\d+) ([+-])> (\d+)\.(\d+)", text)
    wanted = [t for transfers in drawn.rounds for t in transfers[:16]]
    assert said == [
        (str(t.src), str(t.read), "+" if t.reduce else "-", str(t.dst), str(t.write))
        for t in wanted
    ]


def test_a_long_round_says_how_much_it_leaves_out():
    assert "... 40 more" in grid(schedule("all_gather", "direct", 8))


def test_an_error_shows_the_rounds_around_the_fault():
    ring = schedule("all_reduce", "ring", 16)
    wrong = Schedule(16, 16, (*ring.rounds[:12], ring.rounds[3], *ring.rounds[13:]))
    with pytest.raises(ScheduleError) as error:
        verify(wrong, "all_reduce")
    lines = str(error.value).splitlines()
    (marked,) = [i for i, line in enumerate(lines) if "<-- here" in line]
    assert lines[0].startswith("round 12, transfer 0.12 +> 1.12: counts ")
    assert "0.12 +> 1.12  <-- here" in lines[marked]
    assert lines[1] == "... 9 rounds before"
    assert lines[-1] == "... 14 rounds after"
    assert all(len(line) <= 80 for line in lines[1:])


@pytest.mark.parametrize(("collective", "name", "n"), EVERY)
def test_the_svg_has_a_panel_a_round_and_an_arrow_a_pair(collective, name, n):
    drawn = schedule(collective, name, n)
    root = ElementTree.fromstring(svg(drawn))
    panels = root.findall(f"{SVG}g")
    assert len(panels) == len(drawn.rounds)
    heads = {marker.get("id") for marker in root.iter(f"{SVG}marker")}
    for panel, transfers in zip(panels, drawn.rounds, strict=True):
        arrows = list(panel.iter(f"{SVG}path"))
        assert len(arrows) == len({(t.src, t.dst, t.reduce) for t in transfers})
        assert {re.sub(r"url\(#(.*)\)", r"\1", a.attrib["marker-end"]) for a in arrows} <= heads
        dashed = sum("stroke-dasharray" in a.attrib for a in arrows)
        assert dashed == len({(t.src, t.dst) for t in transfers if not t.reduce})
        assert len(list(panel.iter(f"{SVG}circle"))) == n


@pytest.mark.parametrize(("collective", "name", "n"), [e for e in EVERY if e[2] > 1])
def test_nothing_in_the_svg_lies_outside_its_panel(collective, name, n):
    root = ElementTree.fromstring(svg(schedule(collective, name, n)))
    size = int(root.attrib["width"]) / min(3, len(root.findall(f"{SVG}g")))
    for path in root.iter(f"{SVG}path"):
        if "marker-end" in path.attrib:
            numbers = [float(x) for x in re.findall(r"-?\d+\.\d", path.attrib["d"])]
            assert max(map(abs, numbers)) <= size / 2


def test_an_arrow_names_all_its_chunks():
    root = ElementTree.fromstring(svg(schedule("reduce_scatter", "halving", 8)))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts.count("4-7") == 4
    assert ranges([5, 2, 1, 0]) == "0-2,5"


def test_a_schedule_that_moves_nothing_is_drawn():
    assert "nothing moves" in svg(schedule("all_reduce", "ring", 1))
    assert svg(Schedule(1, 1, ((Transfer(0, 0, 0, 1, reduce=False),),)))
    assert grid(Schedule(1, 1, ((),))) == "round 0:"
