"""The page of `ringdp report` in a real browser."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest

from ringdp.cli.timeline.command import fill
from ringdp.cli.timeline.digest import digest
from ringdp.cli.timeline.read import read
from tests.browser import needs_browser
from tests.cli.conftest import edited
from tests.cli.timeline.made import HELD, trace

DRIVE = """(async () => {
    const wait = (ms) => new Promise((done) => setTimeout(done, ms));
    while (byId("main").hidden && !byId("state").className.includes("warn")) await wait(20);
    const found = {}, text = (id) => byId(id).textContent;
    const cells = (id) => [...byId(id).querySelectorAll("tbody tr")].map(
        (row) => [...row.children].map((cell) => cell.textContent));
    found.state = text("state");
    found.idle = text("timelineSays");
    found.short = us(1.234);
    found.opened = [chosen, ...[3999, 4001].map((size) => {
        data.collectives[0].bytes = size;
        return largest();
    })];
    data.collectives[0].bytes = 4000;
    found.shares = cells("shares");
    found.kinds = cells("kinds");
    found.bytes = cells("bytes");
    const canvas = CanvasRenderingContext2D.prototype, write = canvas.fillText;
    found.written = [drawKinds, drawMemory, drawTimeline].map((draw) => {
        const texts = [];
        canvas.fillText = (what) => texts.push(what);
        draw();
        canvas.fillText = write;
        return texts;
    });
    found.ticks = [[0, 1, 5, TIMES], [2999, 3000.1, 3, TIMES], [0, 4.1e6, 4, SIZES]].map(
        (asked) => ticks(...asked));
    found.whole = text("range");
    byId("step").click();
    found.step = text("range");
    byId("in").click();
    found.zoomed = text("range");
    byId("right").click();
    found.moved = text("range");
    byId("timeline").dispatchEvent(new KeyboardEvent("keydown", { key: "0" }));
    found.all = text("range");
    found.wheeled = [false, true].map((ctrlKey) => {
        const wheel = new WheelEvent("wheel", { deltaY: -1, ctrlKey, cancelable: true });
        return [byId("timeline").dispatchEvent(wheel), text("range")];
    });
    byId("fit").click();
    const forward = rows.find((row) => row.lane), width = byId("timeline").clientWidth;
    const [x, y, w] = box(forward, 1, width);
    tell(spanAt(x + w / 2, y + 3));
    found.span = text("timelineSays");
    found.exposed = [...exposed(0, 700, 1300)];
    const rgb = (g, x, y) => [...g.getImageData(x, y, 1, 1).data].slice(0, 3);
    const paint = document.createElement("canvas").getContext("2d");
    const painted = (style) => {
        paint.fillStyle = style;
        paint.fillRect(0, 0, 1, 1);
        return rgb(paint, 0, 0);
    };
    found.colors = Object.keys(COLORS).map((c) => [painted(colorOf(c)), painted(inkOn(c))]);
    const lane = rows.filter((row) => row.lane)[1], all = byId("timeline").getContext("2d");
    found.bar = [1000, 1200].map((t) => rgb(all, (t / 3800) * width, lane.y + 17));
    found.expected = [painted(colorOf("collective")), painted(colorOf("wait"))];
    const press = (id, key) => byId(id).dispatchEvent(new KeyboardEvent("keydown", { key }));
    found.walked = ["n", "n", "p", "ArrowDown", "ArrowUp"].map((key) => {
        press("timeline", key);
        return text("timelineSays").split(":")[1].split("(")[0].trim();
    });
    byId("kinds").querySelector("tbody tr").click();
    found.chosen = text("chunkSays");
    press("chunks", "ArrowRight");
    found.chunk = text("chunkSays");
    tellChunk(chunkAt(byId("chunks").clientWidth - 2, 40));
    found.pointed = text("chunkSays");
    byId("before").click();
    found.first = byId("before").disabled;
    while (!byId("replay").contentWindow?.go) await wait(20);
    follow(extent()[0] + 1);
    found.round = byId("replay").contentDocument.getElementById("round").textContent;
    follow(extent()[1]);
    found.last = byId("replay").contentDocument.getElementById("round").textContent;
    byId("play").click();
    found.playing = text("play");
    await wait(6000);
    found.played = text("play");
    found.shades = getComputedStyle(byId("kinds").parentElement).backgroundAttachment;
    document.body.style.margin = 0;
    byId("timeline").style.height = "3000px";
    scrollTo(0, 0);
    found.sees = byId("timelineSays").getBoundingClientRect().bottom <= innerHeight;
    found.fits = [400, 1280].map((wide) => {
        document.body.style.width = document.body.style.maxWidth = `${wide}px`;
        dispatchEvent(new Event("resize"));
        const over = [...document.querySelectorAll("main > *, section > *")].filter(
            (e) => e.getBoundingClientRect().right > wide + 1 || e.scrollWidth > wide + 1 &&
                !e.classList.contains("scroll"));
        return [over.map((e) => e.id || e.tagName), byId("timeline").clientWidth];
    });
    const algorithm = byId("kinds").querySelector("td:nth-child(2)");
    algorithm.textContent = `mine.py:${"long".repeat(50)}`;
    found.named = algorithm.scrollWidth;
    const out = document.createElement("pre");
    out.id = "found";
    out.textContent = JSON.stringify(found);
    document.body.append(out);
})().catch((error) => { document.title = `ERROR ${error}`; });"""


DRIVE_ALONE = """(async () => {
    while (byId("main").hidden) await new Promise((done) => setTimeout(done, 20));
    CanvasRenderingContext2D.prototype.fillText = (what) => { document.title = what; };
    drawChunks();
})();"""


DRIVE_DENSE = """(async () => {
    while (byId("main").hidden) await new Promise((done) => setTimeout(done, 20));
    const lane = data.lanes[0], [name, category] = lane.spans[0], each = (last - first) / 5000;
    lane.spans = Array.from({ length: 10000 }, (_, i) =>
        [name, category, first + (i >> 1) * each, i % 2 ? each / 2 : each, -1]);
    rows = [];
    layOut();
    drawTimeline();
    const width = byId("timeline").clientWidth, y = rows.find((row) => row.lane).y + 14;
    const drawn = byId("timeline").getContext("2d").getImageData(0, y + 5, width, 1).data;
    document.title = drawn.filter((value, i) => i % 4 === 3 && value === 0).length;
})();"""


DRIVE_MANY = """(async () => {
    while (byId("main").hidden) await new Promise((done) => setTimeout(done, 20));
    const [chunk] = data.chunks[0];
    data.chunks[0] = [chunk, ...Array(200000).fill(chunk.with(3, 0))];
    choose(0);
    document.title = extent().join();
})();"""


DRIVE_NOTHING = """(async () => {
    while (byId("main").hidden) await new Promise((done) => setTimeout(done, 20));
    for (const button of document.querySelectorAll("button")) {
        if (button.offsetParent) button.click(); // it can be seen
    }
    for (const key of ["n", "p", "ArrowDown", "+", "0"]) {
        byId("timeline").dispatchEvent(new KeyboardEvent("keydown", { key }));
    }
    dispatchEvent(new Event("resize"));
    const hidden = [...document.querySelectorAll("section")].map((s) => s.hidden).join();
    if (!document.title.startsWith("ERROR")) document.title = hidden;
})();"""


MOMENT = {"ph": "X", "name": "a", "cat": "step", "ts": 5, "dur": 0, "pid": 0, "tid": 1, "args": {}}


@needs_browser
@pytest.mark.parametrize("events", [[], [MOMENT]], ids=["empty", "a moment"])
def test_the_page_of_a_trace_without_collectives_works(browse, tmp_path: Path, events):
    with edited(path := trace(tmp_path)) as document:
        for part in document["ringdp"]["parts"].values():
            for kind in ("communicators", "engines", "schedules"):
                del part[kind]
        document["traceEvents"] = events
    dom = browse(fill(digest(read(path)), "run"), script=DRIVE_NOTHING)
    assert dom.texts["title"] == "true,true,true"
    assert dom.texts["notes"] == "No collective is in this trace."


@needs_browser
@pytest.mark.parametrize(
    ("ranks", "unpriced", "unmoved"),
    [
        (1, "One rank moves nothing: nothing is predicted.", "One rank moves nothing."),
        (2, "Nothing is predicted: for that all ranks must", "No chunks: nothing moved, or the"),
    ],
)
def test_missing_predictions_and_chunks_are_explained(
    browse, tmp_path: Path, ranks: int, unpriced: str, unmoved: str
):
    found = digest(read(trace(tmp_path)))
    kinds = [c | {"ranks": ranks, "predicted": None} for c in found["collectives"]]
    found |= {"ranks": ranks, "model": None, "chunks": [[], []], "collectives": kinds}
    dom = browse(fill(found, "run"), script=DRIVE_ALONE)
    assert dom.texts["model"].startswith(unpriced)
    assert dom.texts["title"].startswith(unmoved)


@needs_browser
def test_the_models_caches_are_described(browse, tmp_path: Path):
    bench = Path(__file__).parents[3] / "bench/results/all_reduce.json"
    found = digest(read(trace(tmp_path)), str(bench))
    (end, more), *_ = found["model"]["caches"]
    dom = browse(fill(found, "run"), script=DRIVE_ALONE)
    assert f", {1e9 * more:.3f} more on the bus after {end:,.0f}" in dom.texts["model"]


@needs_browser
def test_dense_spans_leave_no_gaps(browse, tmp_path: Path):
    page = fill(digest(read(trace(tmp_path))), "run.json")
    assert browse(page, script=DRIVE_DENSE).texts["title"] == "0"


@needs_browser
def test_a_collective_may_have_many_chunks(browse, tmp_path: Path):
    page = fill(digest(read(trace(tmp_path))), "run.json")
    assert browse(page, script=DRIVE_MANY).texts["title"] == "700,800"


def contrast(*colors: list[int]) -> float:
    """The contrast of two colors, as defined by WCAG 2."""
    linear = [
        [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
            for c in (v / 255 for v in rgb)
        ]
        for rgb in colors
    ]
    dark, light = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in linear)
    return (light + 0.05) / (dark + 0.05)


@needs_browser
def test_the_page_shows_and_navigates_the_trace(browse, tmp_path: Path):
    run = read(trace(tmp_path, {"2": "rank 2 (process 9) ended"}))
    dom = browse(fill(digest(run), "<b>{{data}}"), script=DRIVE)
    found = json.loads(dom.texts["found"])
    assert found["idle"] == "Nothing is pointed at."
    assert found["short"] == "1.23 µs"
    assert found["state"] == "2 ranks, 3.80 ms, 2 collectives, 12 chunks."
    assert dom.texts["notes"] == "rank 2 (process 9) ended"
    assert found["opened"] == [1, 1, 0]
    assert found["shares"] == [
        [str(rank), "3.80 ms", "3.20 ms", "0.0 µs", "1.00 ms", "600.0 µs", "400.0 µs", "0.0 µs"]
        for rank in range(2)
    ]
    (kind,) = found["kinds"]
    assert kind == [
        *("all_reduce", "ring", "2", "4,000", "2"),
        *("500.0 µs", "500.0 µs", "1.00", "100.0 µs"),
    ]
    kinds, memory, timeline = found["written"]
    assert kinds == ["measured ↑", "predicted →", "500.0 µs", "500.0 µs"]
    assert {"0.0 ms", "0.2 ms", "1.8 ms", "0 kB", "1 kB", "3 kB"} <= {*memory}
    assert timeline.count("0.5 ms") == timeline.count("3.5 ms") == 2  # once a rank
    assert [[text for _, text in marks] for marks in found["ticks"]] == [
        ["0.0 µs", "0.2 µs", "0.4 µs", "0.6 µs", "0.8 µs", "1.0 µs"],
        ["2.9990 ms", "2.9995 ms", "3.0000 ms"],
        ["0 MB", "2 MB", "4 MB"],
    ]
    assert found["bytes"] == [[k, f"{v:,}", f"{v:,}", "="] for k, v in HELD.items()]
    assert found["whole"] == found["all"] == "0.0 µs – 3.80 ms"
    assert found["step"] == "1.80 ms – 3.80 ms"
    assert found["zoomed"] == "2.30 ms – 3.30 ms"
    assert found["moved"] == "2.60 ms – 3.60 ms"
    assert found["wheeled"] == [[True, found["all"]], [False, "0.0 µs – 3.04 ms"]]
    assert found["sees"]
    assert found["span"].startswith("rank 0, main thread: backward root (backward), from 500.0 µs")
    assert "4,000 bytes on 2 ranks, at train.py:7: 500.0 µs, predicted 500.0" in found["chosen"]
    assert found["bar"] == found["expected"]
    colors = [color for color, _ in found["colors"]]
    assert min(math.dist(*pair) for pair in itertools.combinations(colors, 2)) > 50  # of 442
    assert min(contrast(*pair) for pair in found["colors"]) >= 4.5
    assert found["exposed"] == [[1100, 1300]]
    steps = ["forward root", "backward root", "forward root", "all_reduce #0", "backward root"]
    assert found["walked"] == steps
    chunk = "rank {}: {}, round {}, piece 0, 2,000 bytes, from {} for 100.0 µs, of which it waited "
    assert found["chunk"].startswith(chunk.format(0, "send", 0, "0.0 µs") + "50.0 µs for a peer")
    assert found["pointed"].startswith(chunk.format(1, "recv", 1, "300.0 µs"))
    assert found["first"] is True
    assert found["named"] < 400
    assert (found["round"], found["last"]) == ("round 0 of 0–1", "round 1 of 0–1")
    assert (found["playing"], found["played"]) == ("Stop", "Play")
    assert found["shades"] == "local, local, scroll, scroll"
    roles = [of["role"] for tag, of in dom.elements if tag == "canvas" and "tabindex" in of]
    assert roles == ["application"] * 2  # otherwise a screen reader would not pass on keys
    assert found["fits"] == [[[], 376], [[], 1256]]
