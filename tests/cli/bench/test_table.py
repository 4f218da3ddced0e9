"""The bench table: nccl-tests' columns with prediction, bound and best peer, at any width."""

from dataclasses import replace

import pytest

from ringdp.cli.bench.options import Options
from ringdp.cli.bench.rows import Report
from ringdp.cli.bench.table import show
from tests.cli.bench.rows import peer, row
from tests.cli.conftest import printed

ROWS = [row(), peer("gloo", 300.0), peer("mpich", 150.0)]
SLOW = ((53.1, "shm"), (48_433.0, "c10d"))


def shown(rows: list, width: int, *, terminal: bool) -> str:
    report, options = (
        Report({"cores": "2", "cpu": "cpu"}, {}, rows),
        Options("all_reduce", rounds=3),
    )
    return printed(lambda console: show(console, report, options), width, terminal=terminal)


def cells(text: str, name: str) -> list[str]:
    return next(line for line in text.splitlines() if f" {name} " in line).split()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_table_is_complete_where_it_fits_and_in_a_file(terminal: bool) -> None:
    text = shown(ROWS, 160 if terminal else 80, terminal=terminal)
    auto = "1,048,576 262,144 float32 sum auto 100.0 90.0 95.0 110.0 10.49 10.49 0 99.0 50.0"
    assert " ".join(cells(text, "auto")) == f"{auto} 50 1.50"
    assert cells(text, "gloo")[-4:] == ["-", "50.0", "17", "-"]


def test_columns_without_values_are_left_out_and_not_explained() -> None:
    text = shown([replace(ROWS[0], predicted_us=None, bound_us=None)], 160, terminal=False)
    assert "× peer" in shown(ROWS, 160, terminal=False)
    assert not any(name in text for name in ("predicted", "bound", "%", "× peer"))
    auto = "1,048,576 262,144 float32 sum auto 100.0 90.0 95.0 110.0 10.49 10.49 0"
    assert " ".join(cells(text, "auto")) == auto


def test_sizes_with_several_rows_are_separated() -> None:
    small = [replace(row, bytes=1024) for row in ROWS]
    for rows, apart in (([*small, *ROWS], True), ([small[0], ROWS[0]], False)):
        body = shown(rows, 160, terminal=False).partition("─\n")[2].strip()
        assert ("\n\n" in body) is apart


def test_a_narrow_terminal_shows_the_main_columns() -> None:
    text = shown(
        [*ROWS, replace(ROWS[0], bytes=64 << 20, p50_us=48_433, bound_us=17_901.3)],
        80,
        terminal=True,
    )
    assert "…" not in text
    assert max(map(len, text.splitlines()[2:])) <= 80
    assert " ".join(cells(text, "auto")) == "1,048,576 auto 100.0 10.49 0 99.0 50.0 50 1.50"


def test_columns_are_dropped_before_numbers_are_cut_off() -> None:
    ours = [replace(ROWS[0], bytes=64 << 20, p50_us=p, transport=t) for p, t in SLOW]
    text = shown([*ours, replace(ROWS[1], bytes=64 << 20, p50_us=54_380.9)], 80, terminal=True)
    assert "…" not in text
    assert max(map(len, text.splitlines()[2:])) <= 80
    assert "#wrong" not in text
    assert " ".join(cells(text, "shm")) == "67,108,864 auto shm 53.1 10.49 99.0 50.0 94 1024.12"


def test_times_below_the_bound_are_pointed_out() -> None:
    faster = [replace(ROWS[0], min_us=49.9), replace(ROWS[1], min_us=50.0)]
    assert "Faster than the bound at its best: auto at 1,048,576 bytes." in shown(
        faster, 160, terminal=False
    )
    assert "Faster than the bound" not in shown(ROWS, 160, terminal=False)


def test_wrong_results_are_pointed_out() -> None:
    text = shown([replace(ROWS[0], wrong=7)], 160, terminal=False)
    assert "WRONG: auto at 1,048,576 bytes: 7 elements" in text
    assert "× peer" not in text
