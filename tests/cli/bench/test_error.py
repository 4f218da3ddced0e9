"""`ringdp bench error`: ulps worked out by hand, and error bounds that hold for every algorithm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ringdp.cli.bench.error import DTYPES, RANKS, check, measure, ulps
from ringdp.cli.bench.options import Options
from ringdp.cli.main import main

ALGORITHMS = ("ring", "two_way_ring", "direct", "halving", "doubling", "tree", "hierarchical")


@pytest.mark.parametrize(
    ("dtype", "exact", "found", "off"),
    [
        (torch.float32, 1.0, 1.0, 0.0),
        (torch.float32, 1.0, 1 + 2**-23, 1.0),
        (torch.float32, 2.0, 2 + 2**-22, 1.0),
        (torch.float32, 1.5 + 2**-25, 1.5, 0.25),
        (torch.bfloat16, -3.0, -3 + 2**-6, 1.0),
        (torch.float16, 0.0, 2**-24, 1.0),
        (torch.float16, 2**-20, 2**-20 + 2**-24, 1.0),
    ],
)
def test_ulps_worked_out_by_hand(dtype, exact, found, off):
    value = torch.tensor([found], dtype=torch.float64)
    assert value.to(dtype).double() == value, "the example is exact in this dtype"
    assert ulps(value.to(dtype), torch.tensor([exact], dtype=torch.float64)).tolist() == [off]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_sum_is_within_its_bound(algorithm):
    for n in (2, 3, 8):
        for row in measure(algorithm, n):
            assert row.same_on_all_ranks
            if row.inputs == "positive":
                assert row.max <= 2 * (n - 1)
                assert row.mean <= row.max
            if n == 2:
                assert (row.max, row.rounded_right) == (0.5, 1.0), "one addition, rounded once"


def test_ulps_of_a_sum_that_cancels_are_finite():
    rows = [row for row in measure("ring", 8) if row.dtype == "bfloat16"]
    assert max(row.max for row in rows) < 2**24, "errors must not be divided by the least subnormal"


def test_direct_rounds_16_bit_sums_once_and_halving_has_the_least_error():
    direct, ring, halving = (
        {(r.dtype, r.inputs): r for r in measure(name, 16)}
        for name in ("direct", "ring", "halving")
    )
    for dtype in ("float16", "bfloat16"):
        assert direct[dtype, "positive"].max <= 0.5 + 15 * 2**-13, (
            "float32's errors, then one rounding"
        )
        assert ring[dtype, "positive"].max > 2
    for dtype in DTYPES:
        assert halving[dtype, "positive"].mean < ring[dtype, "positive"].mean


def test_the_errors_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "error.json"
    assert main(["bench", "error", "--algorithm", "doubling", "--json", str(out)]) == 0
    rows = json.loads(out.read_bytes())
    assert {(r["algorithm"], r["ranks"]) for r in rows} == {("doubling", n) for n in RANKS}
    shown = capsys.readouterr().out
    (line,) = [s for s in shown.splitlines() if s.split()[:2] == ["bfloat16", "doubling"]][:1]
    means = [r["mean"] for r in rows if (r["dtype"], r["inputs"]) == ("bfloat16", "positive")]
    assert [float(word) for word in line.split()[2::2]] == [float(f"{m:.2f}") for m in means]


def test_an_algorithm_that_is_named_twice_is_measured_once():
    options = Options("error", algorithm="auto,ring,direct")
    assert check(options) == ("direct", "ring")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "4"], "--ranks is for what is timed; bench error takes --algorithm and"),
        (["--algorithm", ""], "--algorithm is empty; allowed"),
        (["--algorithm", "fast"], "fast"),
        (["--json", "/no/f"], "--json: cannot write /no/f"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, message, refused):
    refused("bench", "error", *arguments, message=message)
