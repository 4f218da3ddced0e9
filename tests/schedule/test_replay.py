"""The replay page shows in a real browser what the proof computes, and loads nothing from
outside."""

from __future__ import annotations

import json
import re

import pytest

from ringdp.errors import ScheduleError, UsageError
from ringdp.schedule import Schedule, Transfer, contract, schedule
from ringdp.schedule.replay import html
from ringdp.schedule.verify import states
from tests.browser import needs_browser


def expected_holdings(collective, plan: Schedule, r: int) -> dict[str, str]:
    """What every slot holds after round r (-1: at the start), according to the proof."""
    state = list(states(plan, contract(collective, plan.ranks, plan.chunks).before))[r + 1]
    return {
        f"rank {rank} {'chunk' if c < plan.chunks else 'scratch'} {c}": " + ".join(
            f"{q}.{part}" for q, part in sorted(state.get((rank, c), ()))
        )
        or "nothing"
        for rank in range(plan.ranks)
        for c in range(plan.chunks + plan.scratch)
    }


@needs_browser
@pytest.mark.parametrize(
    ("collective", "name", "n", "r"),
    [
        ("all_reduce", "ring", 4, 3),
        ("all_reduce", "direct", 16, 1),
        ("all_to_all", "pairwise", 5, 2),
        ("all_reduce", "ring", 1, -1),
    ],
)
def test_every_slot_shows_the_value_from_the_proof(browse, collective, name, n, r):
    plan = schedule(collective, name, n)
    dom = browse(html(plan, collective), f"#round={r}")
    assert dom.holdings == expected_holdings(collective, plan, r)
    transfers = plan.rounds[r] if r >= 0 else ()
    assert len(dom.of_class("arrow")) == len(transfers)
    assert len(dom.of_class("copy")) == sum(not t.reduce for t in transfers)
    # an arrow has the color of the squares that it moves, also between scratch chunks
    before = list(states(plan, contract(collective, n, plan.chunks).before))[max(r, 0)]
    chunks = [min(before[t.src, t.read])[1] for t in transfers]
    hues = sorted(f"--hue:{360 * chunk // plan.chunks}" for chunk in chunks)
    assert sorted(arrow["style"] for arrow in dom.of_class("arrow")) == hues
    (explained,) = (a for _, a in dom.elements if a.get("id") == "scratch")
    assert ("hidden" in explained) == (plan.scratch == 0)
    after = contract(collective, n, plan.chunks).after
    state = list(states(plan, contract(collective, n, plan.chunks).before))[r + 1]
    assert len(dom.of_class("done")) == sum(state.get(s) == value for s, value in after.items())


@needs_browser
def test_a_selected_chunk_lists_the_inputs_summed_into_it(browse):
    page = html(schedule("all_reduce", "ring", 4), "all_reduce")
    dom = browse(page, "#round=1&slot=3.0")
    assert "Rank 3, chunk 0, after round 1: sums 3 inputs, 1.0 + 2.0 + 3.0." in dom.texts["says"]
    assert "In the end it must hold 0.0 + 1.0 + 2.0 + 3.0." in dom.texts["says"]
    assert "2.0 +> 3.0" in dom.texts["says"]
    assert len(dom.of_class("picked")) == 1


def press(*keys: str) -> str:
    return "".join(
        f"(document.activeElement || document.body).dispatchEvent("
        f"new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}}));"
        for key in keys
    )


def click(*ids: str) -> str:
    return "".join(f"document.getElementById('{name}').click();" for name in ids)


def mouse(event: str) -> str:
    return f"cells[12].cell.dispatchEvent(new MouseEvent('{event}'));"


# Name -> script that drives the page from the start; what #round shows then; a part of #says.
DRIVES = {
    "forward": (click("forward", "forward"), "round 1 of 0-5", "0.2 +> 1.2"),
    "back": (click("forward", "forward", "back"), "round 0 of 0-5", "0.3 +> 1.3"),
    "back at the start": (click("back", "back"), "at the start", "Before round 0. 0 of 16"),
    "keys": (press("ArrowRight", ".", "ArrowRight", "ArrowLeft", ","), "round 0 of 0-5", ""),
    "end": (press("End", "ArrowRight"), "round 5 of 0-5", "16 of 16 results are in place"),
    "home": (press("End", "Home"), "at the start", ""),
    "slider": (
        "byId('slider').value = 2; byId('slider').dispatchEvent(new Event('input'));",
        "round 2 of 0-5",
        "4 of 16 results",
    ),
    "hash": ("location.hash = '#round=4';", "round 4 of 0-5", ""),
    "hash too far": ("location.hash = '#round=99&slot=9.9';", "round 5 of 0-5", ""),
    "hash of nonsense": ("location.hash = '#round=x&slot=a.b';", "at the start", ""),
    "play": (click("play"), "round 5 of 0-5", ""),
    "space": (press(" "), "round 5 of 0-5", ""),
    "pause": (click("forward", "play", "play"), "round 0 of 0-5", ""),
    "play again": (press("End") + click("play", "play"), "at the start", ""),
    "in the grid": (
        "cells[0].cell.focus();" + press("ArrowRight", "ArrowDown", "ArrowDown", "ArrowUp", "."),
        "round 0 of 0-5",
        "Rank 1, chunk 1, after round 0: holds 1.1, one input.",
    ),
    "edge of the grid": (
        "cells[0].cell.focus();" + press("ArrowLeft", "ArrowUp"),
        "at the start",
        "Rank 0, chunk 0, before round 0",
    ),
    "point": (click("forward") + mouse("mouseenter"), "round 0 of 0-5", "Rank 3, chunk 0, after"),
    "leave": (mouse("mouseenter") + mouse("mouseleave"), "at the start", "Before round 0"),
}


@needs_browser
def test_buttons_slider_keyboard_and_mouse_work(browse):
    ring = schedule("all_reduce", "ring", 4)
    # One page for all scripts: starting a browser takes longer than running them.
    drives = ",".join(f"() => {{ {script} }}" for script, _, _ in DRIVES.values())
    script = f"""(async () => {{
        const found = [];
        for (const drive of [{drives}]) {{
            pause();
            if (document.activeElement) document.activeElement.blur();
            go(-1);
            drive();
            await new Promise((done) => setTimeout(done, 8000));
            found.push({{
                round: byId("round").textContent.replace("–", "-"),
                says: byId("says").textContent,
                play: byId("play").textContent,
                holdings: cells.map(({{ cell }}) => cell.getAttribute("aria-label").split(": ")),
            }});
        }}
        const out = document.createElement("pre");
        out.id = "found";
        out.textContent = JSON.stringify(found);
        document.body.append(out);
    }})();"""
    dom = browse(html(ring, "all_reduce"), script=script)
    found = json.loads(dom.texts["found"])
    for (name, (_, at, says)), saw in zip(DRIVES.items(), found, strict=True):
        assert (name, saw["round"], saw["play"]) == (name, at, "Play")
        assert says in saw["says"], name
        r = int(at.split()[1]) if at.startswith("round") else -1
        assert dict(saw["holdings"]) == expected_holdings("all_reduce", ring, r), name


@needs_browser
def test_the_page_fits_narrow_and_wide_windows(browse):
    script = """
        document.body.style.margin = 0;
        const found = [];
        for (const width of [400, 1200]) {
            document.body.style.width = document.body.style.maxWidth = `${width}px`;
            window.dispatchEvent(new Event("resize"));
            const hidden = byId("scroll").scrollWidth - byId("scroll").clientWidth;
            found.push(`${svg.getBoundingClientRect().right} ${hidden} ${size}`);
        }
        document.title = found.join(" ");"""
    dom = browse(html(schedule("all_reduce", "ring", 16), "all_reduce"), "#round=3", script=script)
    narrow, hidden, small, wide, hidden_too, large = map(float, dom.texts["title"].split())
    assert 300 < narrow <= 400
    assert 1000 < wide <= 1200
    assert hidden == hidden_too == 0
    assert small >= 14
    assert large >= 28


@needs_browser
def test_digits_are_legible_on_every_chunk_color(browse):
    """They have the contrast that WCAG requires of text, in the light and the dark scheme."""
    script = """
        const g = document.createElement("canvas").getContext("2d");
        const light = (color) => {
            g.fillStyle = color;
            g.fillRect(0, 0, 1, 1);
            const [r, green, b] = [...g.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) =>
                v <= 10 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
            return 0.05 + 0.2126 * r + 0.7152 * green + 0.0722 * b;
        };
        const contrasts = () => cells.flatMap(({ parts }) => parts.flat()).filter((shape) =>
            shape.matches(".digit.lit")).map((digit) => {
                const [ink, back] = [digit, digit.previousElementSibling].map((shape) =>
                    light(getComputedStyle(shape).fill));
                return Math.max(ink, back) / Math.min(ink, back);
            });
        const found = contrasts();
        for (const rule of document.styleSheets[0].cssRules) {
            if (rule.media) rule.media.mediaText = "all"; // as a dark screen has it
        }
        found.push(...contrasts());
        document.title = `${found.length} ${Math.min(...found)}`;"""
    dom = browse(html(schedule("all_reduce", "ring", 8), "all_reduce"), "#round=13", script=script)
    digits, worst = dom.texts["title"].split()
    assert int(digits) == 2 * 8 * 8 * 8
    assert float(worst) >= 4.5


@needs_browser
def test_in_crowded_rounds_rank_0s_arrows_are_in_front(browse):
    page = html(schedule("all_reduce", "direct", 8), "all_reduce")
    exchange, folds = browse(page, "#round=0"), browse(page, "#round=1")
    in_front = [a["class"].endswith(" picked") for a in exchange.of_class("arrow")]
    assert in_front == 7 * 7 * [False] + 7 * [True]
    assert "Rank 0’s arrows are in front." in exchange.texts["says"]
    assert "in front" not in folds.texts["says"], "no arrow is in front of arrows within a rank"


@needs_browser
def test_the_explanation_stays_visible_below_a_tall_grid(browse):
    script = """
        const box = () => byId("says").getBoundingClientRect();
        const before = box().height;
        cells[0].cell.focus();
        const edges = [cells[0].cell.getBoundingClientRect().bottom, box().top, box().bottom];
        document.title = [...edges, innerHeight, before].join(" ");"""
    page = html(schedule("all_gather", "direct", 16), "all_gather")
    title = browse(page, "#round=0", script=script).texts["title"]
    cell, top, bottom, window, before = map(float, title.split())
    assert cell <= top < bottom <= window
    assert bottom - top == before < window / 4, "its height does not grow with the transfers listed"


@needs_browser
def test_tab_reaches_the_chunk_that_had_the_focus_last(browse):
    script = """
        cells[5].cell.dispatchEvent(new FocusEvent("focus"));
        document.title = cells.flatMap(({ cell }, at) => cell.tabIndex < 0 ? [] : at).join();"""
    page = html(schedule("all_reduce", "ring", 4), "all_reduce")
    assert browse(page, script=script).texts["title"] == "5"


@needs_browser
def test_controls_are_disabled_without_transfers(browse):
    dom = browse(html(schedule("all_reduce", "ring", 1), "all_reduce"))
    assert dom.texts["round"] == "nothing moves"
    assert [a["id"] for _, a in dom.elements if "disabled" in a] == [
        "back",
        "play",
        "forward",
        "slider",
    ]


def test_the_page_loads_nothing_from_outside():
    text = html(schedule("all_reduce", "ring", 2), "all_reduce")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|src=|@import|url\(|<link", text)
    assert "default-src 'none'" in text


def test_the_title_is_escaped():
    page = html(schedule("all_reduce", "ring", 2), "all_reduce", title="</title><b>{{data}} & x")
    assert "<b>" not in page
    assert page.count("&lt;/title&gt;&lt;b&gt;{{data}} &amp; x") == 2


def test_too_large_and_wrong_schedules_are_refused():
    with pytest.raises(UsageError, match=r"4096 slots; 2 ranks of 3000 .* 6000: show it for fewer"):
        html(Schedule(2, 3000, ()), "all_reduce")
    with pytest.raises(ScheduleError, match="<-- here"):
        html(Schedule(2, 1, ((Transfer(0, 1, 5, 0, reduce=True),),)), "all_reduce")
