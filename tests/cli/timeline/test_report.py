"""`ringdp report`: its figures, and the files that it refuses."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringdp.cli.main import main
from ringdp.cli.plan.hardware import from_files
from ringdp.cli.timeline.collectives import match, medians, prices, schedules
from ringdp.cli.timeline.command import PARTS
from ringdp.cli.timeline.digest import by_rank, digest, length, overlap, share, union
from ringdp.cli.timeline.read import read
from ringdp.errors import UsageError
from ringdp.schedule.cost import Machine, closed, seconds
from tests.cli.conftest import edited
from tests.cli.timeline.made import HELD, LATE, STEP, trace


def test_unions_overlaps_and_lengths_of_intervals():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert overlap([(0, 4), (5, 6)], [(1, 2), (3, 5.5)]) == [(1, 2), (3, 4), (5, 5.5)]
    assert length([(1, 2), (3, 5)]) == 3


def test_hidden_and_exposed_communication(tmp_path: Path):
    run = read(trace(tmp_path))
    events, came = by_rank(run), {w.key: w.came for w in match(run)}
    for rank in range(2):
        moves, waits = 600 - LATE, 200
        found = share(rank, events[rank], came)
        times = (STEP + 1800, 2 * 1600, 0, 2 * moves, 2 * (moves - waits), 2 * waits, 0)
        assert found == (rank, *times)


def test_the_engines_own_work_is_not_counted_as_compute(tmp_path: Path):
    run = read(trace(tmp_path))
    like = next(e for e in by_rank(run)[0] if e.get("cat") == "backward")
    # 150 of the second are waited for; the third is outside of forward and backward.
    for category, begin, took in (
        ("reduce", 600, 50),
        ("prefetch", 1150, 200),
        ("gather", 1900, 60),
    ):
        run.events.append(like | {"cat": category, "ts": begin, "dur": took})
    first, _ = digest(run)["shares"]
    assert (first["compute"], first["engine"]) == (2 * 1600 - 100, 160)
    run.events[:] = [e for e in run.events if e["ph"] != "X"]
    assert all(s["total"] == 0 for s in digest(run)["shares"])


def test_waiting_for_a_late_rank_is_not_counted_as_communication(tmp_path: Path):
    run = read(trace(tmp_path))
    waits = {rank: [e for e in own if e.get("cat") == "wait"] for rank, own in by_rank(run).items()}
    for wait in waits[0]:
        wait |= {"ts": wait["ts"] - 350, "dur": wait["dur"] + 350}  # from 750 on
    first, second = digest(run)["shares"]
    assert [*first.values()][4:] == [2 * 500, 0, 2 * 500, 2 * 50]
    assert [*second.values()][4:] == [2 * 500, 2 * 300, 2 * 200, 0]


def test_a_rank_that_ends_before_the_last_comes_did_not_wait(tmp_path: Path):
    run = read(trace(tmp_path))
    for root in (e for e in by_rank(run)[0] if e.get("cat") == "collective"):
        root["dur"] = LATE / 2
    first, _ = digest(run)["shares"]
    assert [*first.values()][4:] == [LATE, LATE, 0, 0]


def test_the_passes_over_events_do_not_grow_with_the_ranks(tmp_path: Path):
    class Counting(list[Any]):
        times = 0

        def __iter__(self) -> Iterator[Any]:
            self.times += 1
            return super().__iter__()

    run = read(trace(tmp_path))
    few, many = Counting(run.events), Counting(run.events)
    digest(run._replace(events=few))
    parts = dict.fromkeys(range(9), run.parts[1])
    digest(run._replace(events=many, parts=parts))
    assert few.times == many.times > 0


def test_collectives_are_matched_priced_and_fitted(tmp_path: Path):
    run = read(trace(tmp_path))
    wholes = match(run)
    assert [w.key for w in wholes] == [("1.2", 0), ("1.2", 1)]
    assert [(w.measured, w.late, w.late_rank) for w in wholes] == [(600 - LATE, LATE, 1)] * 2
    kind = ("all_reduce", "ring", 2, 4000)
    assert medians(wholes) == {kind: 600 - LATE}
    priced = prices({w.kind for w in wholes}, schedules(run))
    assert priced == {kind: closed("all_reduce", "ring", 2)}
    found = digest(run)
    assert found["collectives"][0]["predicted"] == pytest.approx(600 - LATE)  # fitted to this run
    assert seconds(priced[kind], Machine(1e-6, 1e-9, 0.0), 4000) * 1e6 == pytest.approx(2 + 4)


def test_times_keep_their_nanoseconds(tmp_path: Path):
    run = read(trace(tmp_path))
    for event in (e for e in by_rank(run)[1] if e.get("cat") == "collective"):
        event["ts"] += 0.012
        event["dur"] -= 0.012
    found = digest(run)["collectives"][0]
    assert (found["late"], found["measured"]) == (LATE + 0.012, 600 - LATE - 0.012)


def test_an_emulated_links_own_terms_are_used(tmp_path: Path):
    with edited(path := trace(tmp_path)) as document:
        for part in document["ringdp"]["parts"].values():
            part["communicators"][0]["link"] = {"latency": 1e-4, "bandwidth": 1e8}
    found = digest(read(path))
    assert found["model"]["source"] == "the emulated link's α and β"
    assert found["collectives"][0]["predicted"] == 2 * 100 + 4000 / 100  # µs: 2 α + S β


def test_with_several_links_the_runs_own_fit_is_used(tmp_path: Path):
    with edited(path := trace(tmp_path)) as document:
        for part in document["ringdp"]["parts"].values():
            (comm,) = part["communicators"]
            linked = {**comm, "name": "2", "link": {"latency": 1e-4, "bandwidth": 1e8}}
            part["communicators"] = [linked, comm]
    found = digest(read(path))
    assert found["model"]["source"].startswith("fitted to this run's own medians")
    assert found["collectives"][0]["predicted"] == pytest.approx(600 - LATE)


def test_the_digest_for_the_page(tmp_path: Path):
    found = digest(read(trace(tmp_path, {"2": "rank 2 (process 9) ended"})))
    assert found["notes"] == ["rank 2 (process 9) ended"]
    assert [(x["rank"], x["title"], len(x["spans"])) for x in found["lanes"]] == [
        (rank, *lane)
        for rank in (0, 1)
        for lane in (("main thread", 8), ("reductions of stage 2", 2))
    ]
    assert [len(c) for c in found["chunks"]] == [6, 6]
    texts = {found["names"][chunk[1]] for chunk in found["chunks"][0]}
    assert texts == {"send", "recv_reduce_copy_send", "recv"}
    for engine in found["memory"]:
        assert engine["points"] == [[0.0, *HELD.values()], [float(STEP), *HELD.values()]]
        assert engine["formula"] == list(HELD.values())
    assert list(found["replays"]) == ["ring on 2"]
    assert "<h1>ring all_reduce on 2 ranks</h1>" in found["replays"]["ring on 2"]


def test_lanes_have_one_order_on_all_ranks(tmp_path: Path):
    run = read(trace(tmp_path))
    other = {"main thread": 9, "reductions of stage 2": 1}
    numbers = {e["tid"]: other[e["args"]["name"]] for e in run.events if e["name"] == "thread_name"}
    for event in run.events:
        if event["pid"] == 1 and "tid" in event:
            event["tid"] = numbers.get(event["tid"], 0)
    lanes = digest(run)["lanes"]
    of = [[lane["title"] for lane in lanes if lane["rank"] == rank] for rank in (0, 1)]
    assert of[0] == of[1] == list(other)


def test_predictions_use_a_bench_file(tmp_path: Path):
    bench = Path(__file__).parents[3] / "bench" / "results" / "all_reduce.json"
    found = digest(read(trace(tmp_path)), str(bench))
    measured = from_files(str(bench))
    assert found["model"]["alpha"] == measured.machine.alpha
    machine = measured.fitted.get("all_reduce", measured.machine)
    guess = seconds(closed("all_reduce", "ring", 2), machine, 4000) * 1e6
    assert found["collectives"][0]["predicted"] == pytest.approx(guess, abs=0.05)


ABOUT = '{"version": 1, "ranks": 1, "missing": {}, "parts": {}}'
REFUSED = {
    "missing": (None, "cannot read {}: No such file or directory; allowed: a file of ringdp.trace"),
    "empty": ("", "{} is not JSON"),
    "words": ("hello", "{} is not JSON"),
    "bytes": (b"\xff\xfe\x00", "{} is no text"),
    "a list": ("[]", "{} is no trace of this version of ringdp"),
    "another's": ('{"traceEvents": []}', "{} is no trace of this version of ringdp"),
    "newer": ('{"traceEvents": [], "ringdp": {"version": 99}}', "{} is no trace of this version"),
    "no events": ('{"ringdp": {"version": 1}}', "{} is damaged: it has no traceEvents"),
    "no ranks": ('{"traceEvents": [], "ringdp": {"version": 1}}', "ringdp has no ranks; allowed"),
    "deep": ("[" * 200_000, "{} is nested too deeply; allowed"),
    "events": (f'{{"traceEvents": [{{"ph": "Q"}}], "ringdp": {ABOUT}}}', "[0].ph is 'Q'"),
    "no event": (f'{{"traceEvents": [7], "ringdp": {ABOUT}}}', "traceEvents[0] is 7, no object"),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused_in_one_line(tmp_path: Path, refused, content, message: str):
    path, page = tmp_path / "run.json", tmp_path / "page.html"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused("report", str(path), "--html", str(page), message=message.format(path))
    assert not page.exists()


def test_damaged_files_and_bad_options_are_refused_in_one_line(tmp_path: Path, refused):
    path, page = trace(tmp_path), tmp_path / "page.html"

    def refused_with(message: str, *more: str, trace: Path = path, html: Path = page) -> None:
        refused("report", str(trace), "--html", str(html), *more, message=message)

    text = path.read_text(encoding="utf-8")
    (tmp_path / "half.json").write_text(text[: len(text) // 2], encoding="utf-8")
    refused_with("half.json is cut off", trace=tmp_path / "half.json")
    for name in ("nowhere/page.html", "x" * 300):
        refused_with("--html: cannot write", html=tmp_path / name)
    refused_with("--network is '400Gb'; allowed: a .json", "--network", "400Gb")
    refused_with(f"--html: {path} is the trace itself", html=path)
    assert path.read_text(encoding="utf-8") == text
    with edited(path) as document:
        document["ringdp"]["ranks"] = 1
    refused_with("ringdp.parts.1 is of no rank")
    with edited(path) as document:
        document["ringdp"]["ranks"], document["traceEvents"][0]["pid"] = 2, 2
        document["ringdp"]["parts"]["0"] = document["ringdp"]["parts"].pop("1")
    refused_with("traceEvents[0].pid is 2, of no rank")
    (tmp_path / "other[1].json.ab12.rank1.part").write_text("{}", encoding="utf-8")
    message = "rank 0 ended before it merged other[1].json.ab12.rank1.part"
    refused_with(message, trace=tmp_path / "other[1].json")
    refused("report", "", "--html", str(page), message="'trace': a path is empty; allowed")
    assert not page.exists()


BAD = [None, "x", -1, {}, [], 0, 2.5, 1e308, True, math.nan, 10**30, [[]]]
DELETED = object()


def places(value: Any, at: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The places of all values in it, two of each list."""
    yield at
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(min(len(value), 2)):
            yield from places(value[key], (*at, key))


def test_any_damaged_value_is_refused_in_one_line_or_shown(tmp_path: Path):
    path = trace(tmp_path)
    whole = path.read_text(encoding="utf-8")
    document = json.loads(whole)
    about, events = document["ringdp"], document["traceEvents"]
    kinds = {(e["ph"], e.get("cat", e["name"])): i for i, e in enumerate(events)}
    damaged = [*places(about, ("ringdp",))][1:]
    for index in kinds.values():
        damaged += places(events[index], ("traceEvents", index))
    messages = []
    for turn, place in enumerate(damaged):
        for bad in (DELETED, *BAD[turn % 6 :: 6]):
            document = json.loads(whole)
            inner = document
            for key in place[:-1]:
                inner = inner[key]
            if bad is DELETED:
                del inner[place[-1]]
            else:
                inner[place[-1]] = bad
            path.write_text(json.dumps(document), encoding="utf-8")
            try:
                json.dumps(digest(read(path)), allow_nan=False)
            except UsageError as error:
                messages.append(str(error))
    assert not any("\n" in text for text in messages)
    assert len(messages) > len(damaged)


def test_only_a_collectives_line_is_read(tmp_path: Path):
    run = read(trace(tmp_path))
    next(e for e in run.events if e.get("cat") == "forward")["args"]["at"] = []
    found = digest(run)
    called = {
        (found["names"][kind], at >= 0) for x in found["lanes"] for _, kind, *_, at in x["spans"]
    }
    assert called == {(kind, kind == "collective") for kind, _ in called}


def test_names_that_look_like_markup_are_printed_unchanged(tmp_path: Path, capsys):
    place = tmp_path / "[bold]:zap:[" / "b]"
    place.mkdir(parents=True)
    assert main(["report", str(trace(place)), "--html", str(place / "page.html")]) == 0
    assert f"wrote {place / 'page.html'}, " in capsys.readouterr().out


def test_the_page_loads_nothing_from_outside(tmp_path: Path, capsys):
    page = tmp_path / "page.html"
    assert main(["report", str(trace(tmp_path)), "--html", str(page)]) == 0
    messages = capsys.readouterr().out
    assert "rank 0: in 3.8 ms computed 3.2 ms, was 0.0 ms in the engine, communicated" in messages
    assert "communicated 1.0 ms, of which 0.6 hidden and 0.4 waited for; waited 0.0 ms" in messages
    assert f"wrote {page}, {page.stat().st_size:,} bytes" in " ".join(messages.split())
    parts = [file.read_text(encoding="utf-8") for file in PARTS.iterdir()]
    assert not any(re.search(r"https?://|src=|@import|url\(|<link|fetch\(", p) for p in parts)
    assert "default-src 'none'" in page.read_text(encoding="utf-8")


def test_the_command_prints_the_pages_warnings(tmp_path: Path, capsys):
    path = trace(tmp_path, {"2": "rank 2 (process 9) ended"})
    with edited(path) as document:
        document["ringdp"]["parts"]["1"] |= {"lost": 1234, "clock_error_us": 5.5, "host": "far"}
    assert main(["report", str(path), "--html", str(tmp_path / "page.html")]) == 0
    messages = capsys.readouterr().out
    notes = digest(read(path))["notes"]
    assert len(notes) == 3
    assert all(note in messages for note in notes)


def test_only_adam_has_a_memory_formula(tmp_path: Path):
    with edited(path := trace(tmp_path)) as document:
        for part, name in zip(document["ringdp"]["parts"].values(), ("SGD", "AdamW"), strict=True):
            part["engines"][0]["optimizers"] = [name]
    sgd, adam = digest(read(path))["memory"]
    assert (sgd["optimizers"], sgd["formula"]) == ("SGD", [*list(HELD.values())[:-1], None])
    assert (adam["optimizers"], adam["formula"]) == ("AdamW", list(HELD.values()))


def test_algorithms_that_cannot_be_replayed_are_explained(tmp_path: Path):
    path = trace(tmp_path)
    text = path.read_text(encoding="utf-8").replace('"algorithm": "ring"', '"algorithm": "gone"')
    path.write_text(text.replace('"algorithm":"ring"', '"algorithm":"nccl"'), encoding="utf-8")
    found = digest(read(path))
    assert found["replays"] == {}
    assert found["unplayed"]["nccl on 2"].startswith("no all_reduce algorithm 'nccl'")
