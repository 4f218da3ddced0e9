"""The final table, the JSON and the live table of `ringdp train`: no number is cut off."""

from dataclasses import replace

import pytest
from rich.console import Console

from ringdp.cli.progress import Display, plain_line
from ringdp.cli.report import sample_line, show
from ringdp.cli.runs import Progress, Record, to_json
from tests.cli.conftest import printed
from tests.cli.rows import MEMORY, REFERENCE, STAGE_0, STAGES


def shown(
    width: int, runs: list[Record], reference: Record | None, problems: list[str]
) -> list[str]:
    text = printed(lambda c: show(c, runs, reference, problems), width, terminal=False)
    return text.splitlines()


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_fits_without_cutting_anything_off(width: int) -> None:
    lines = shown(width, STAGES, REFERENCE, [])
    assert all(len(line) <= width for line in lines)
    assert "…" not in "\n".join(lines)


def test_formulas_are_below_their_quantities() -> None:
    lines = shown(80, STAGES, REFERENCE, [])
    [at] = [i for i, line in enumerate(lines) if line.startswith(" buckets")]
    assert lines[at].split() == ["buckets"] + ["104,857,600"] * 4
    assert lines[at + 1].split() == ["formula"] + ["=", "104,857,600"] * 4


def test_every_quantity_has_a_row() -> None:
    text = "\n".join(shown(80, STAGES, REFERENCE, []))
    for label in ("final loss", "largest |Δloss|", "float32 bound", "step ms", "gathered peak"):
        assert label in text
    assert "1.00e-06" in text
    assert "Stages 0, 1, 2, 3 are equal bit for bit" in text
    assert r"It writes: def f():\n\treturn '\xff'" in text


def test_differences_are_pointed_out() -> None:
    wrong = replace(STAGE_0, stage=3, sent=7, loss=(5.5, 4.0, 2.4))
    text = "\n".join(shown(80, [STAGE_0, wrong], None, ["it is 7"]))
    assert "≠ 12,390,912" in text
    assert "NOT equal bit for bit" in text
    assert "WRONG: it is 7" in text
    assert "equal their formulas" not in text


def test_singular_forms_are_used() -> None:
    alone = replace(STAGE_0, ranks=1, loss=(2.5,), seconds=(0.1,))
    assert shown(80, [alone], None, [])[1] == "1,032,576 parameters, 1 rank, 1 step"


def test_sample_line_is_one_printable_line() -> None:
    assert sample_line(b"a\\\n\r\t\x00\x7f\xe9'\"") == "a\\\\\\n\\r\\t\\x00\\x7f\\xe9'\""


def test_json_has_the_documented_keys() -> None:
    found = to_json(STAGE_0)
    assert found == {
        "stage": 0,
        "ranks": 2,
        "parameters": 1_032_576,
        "loss": [5.5, 4.0, 2.5],
        "step_ms": {"p20": 100.0, "p50": 100.0, "p80": 160.0},
        "tokens_per_s": 10240.0,
        "memory": {**MEMORY, "formula": MEMORY},
        "traffic": {"sent_bytes_per_step": 12_390_912, "formula": 12_390_912},
    }


@pytest.mark.parametrize(("width", "shows"), [(80, "100.00"), (60, "━"), (40, "123,456")])
def test_live_table_fits(width: int, shows: str) -> None:
    """Leaves out memory or the bar rather than cutting a number."""

    def live(console: Console) -> None:
        display = Display(console)
        display.update(Progress("single", 150, 150, 2.5, 123_456.0, {}))
        display.update(Progress("stage 3", 77, 150, 2.5, 123_456.0, MEMORY))
        console.print(display.table())

    text = printed(live, width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text
    assert any("stage 3" in line and shows in line for line in text.splitlines())


def test_plain_lines_are_few() -> None:

    def plain(console: Console) -> None:
        with Display(console) as display:
            for step in range(1, 101):
                display.update(Progress("stage 0", step, 100, 3.0, 1000.0, MEMORY))

    lines = printed(plain, 80, terminal=False).splitlines()
    assert len(lines) == 2  # the first and the last
    assert lines[1] == plain_line(Progress("stage 0", 100, 100, 3.0, 1000.0, MEMORY))
