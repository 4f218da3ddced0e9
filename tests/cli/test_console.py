"""Printed tables fit a terminal of any width, and are complete in a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ringdp.cli.bench import error
from ringdp.cli.bench.options import Options as BenchOptions
from ringdp.cli.bench.rows import Report
from ringdp.cli.bench.table import show as show_bench
from ringdp.cli.console import say, show_table, table
from ringdp.cli.plan import command as planning
from ringdp.cli.plan.options import Options as PlanOptions
from ringdp.cli.plan.table import show_published
from tests.cli.bench.rows import peer, row
from tests.cli.conftest import printed

BENCH = Path(__file__).parents[2] / "bench/results/all_reduce.json"
BENCHED = BenchOptions("all_reduce")
PLAN = PlanOptions(
    model="gpt2", ranks=2, network=BENCH.name, flops=1e11
)  # a relative path, which fits any width
NARROWEST = 40  # the narrowest terminal, in characters, that everything fits
LARGE = error.Row("two_way_ring", "bfloat16", 64, "normal", 4123.4, 5.1e33, 0.5, True)


def errors(console: Console) -> None:
    of_each = [replace(LARGE, ranks=n, inputs=i) for i in error.INPUTS for n in error.RANKS]
    error.show(of_each, console)


COMMANDS = {
    "bench": lambda c: show_bench(c, Report({"cores": "2", "cpu": "a cpu"}, {}, ROWS), BENCHED),
    "bench error": errors,
    "plan": lambda c: planning.plan(PLAN, c),
    "plan --published": show_published,
}
ROWS = [row(), peer("gloo", 300.0)]


@pytest.fixture(autouse=True)
def in_the_results_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BENCH.parent)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("width", [NARROWEST, 80])
def test_a_terminal_shows_everything_without_breaking_words(command: str, width: int) -> None:
    text, whole = (printed(COMMANDS[command], w) for w in (width, 1000))
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    if command != "bench":  # `bench` drops columns
        assert set(whole.replace("─", "").split()) == set(text.replace("─", "").split())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_gets_everything_at_any_width(command: str) -> None:
    text = printed(COMMANDS[command], NARROWEST, terminal=False)
    assert text == printed(COMMANDS[command], 1000, terminal=False)
    assert [line for line in text.splitlines() if line != line.rstrip()] == []


def test_a_too_wide_table_is_split_and_repeats_its_keys() -> None:
    made = table("name", "first", "second", "third", left=("name",))
    made.add_row("a", "1", "2", "3")
    text = printed(lambda console: show_table(console, made), 22)
    rows = [line.split() for line in text.splitlines() if line.strip("─ ")]
    assert rows == [["name", "first", "second"], ["a", "1", "2"], ["name", "third"], ["a", "3"]]


def test_lines_are_wrapped_on_a_terminal_only() -> None:
    for terminal, expected in ((False, "ten letters\n"), (True, "ten\nletters\n")):
        text = printed(lambda console: say(console, "ten letters"), 8, terminal=terminal)
        assert text.replace(" \n", "\n") == expected
