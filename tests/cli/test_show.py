"""`ringdp show`: its output, its files and refused options."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ringdp.cli.main import main
from ringdp.cli.show import Options, listing, sent, text
from ringdp.schedule import ALGORITHMS, schedule
from ringdp.schedule.algorithms import COLLECTIVES
from ringdp.schedule.custom import proved

RING = """\
ring all_reduce on 4 ranks, proved
6 rounds, 4 chunks, 0 scratch chunks, 3/2 S sent per rank
rank.chunk +> rank.chunk adds, -> replaces

round 0: 0.3 +> 1.3  1.0 +> 2.0  2.1 +> 3.1  3.2 +> 0.2
round 1: 0.2 +> 1.2  1.3 +> 2.3  2.0 +> 3.0  3.1 +> 0.1
round 2: 0.1 +> 1.1  1.2 +> 2.2  2.3 +> 3.3  3.0 +> 0.0
round 3: 1.1 -> 0.1  2.2 -> 1.2  3.3 -> 2.3  0.0 -> 3.0
round 4: 1.2 -> 0.2  2.3 -> 1.3  3.0 -> 2.0  0.1 -> 3.1
round 5: 1.3 -> 0.3  2.0 -> 1.0  3.1 -> 2.1  0.2 -> 3.2
"""
FUSED = """\
rank 1, fused: 7 rows, least FIFO depth 2
round  name                   recv  send   src   dst
    0  send                      -     2     0     -
    0  recv_reduce_send          0     2     -     3
    1  recv_reduce_send          0     2     -     2
    2  recv_reduce_copy_send     0     0     -     1
    3  recv_copy_send            2     0     -     2
    4  recv_copy_send            2     0     -     3
    5  recv                      2     -     -     0
"""


def shown(*arguments, **more) -> str:
    options = Options(*arguments, **more)
    return text(options, proved(options.algorithm, options.collective, options.ranks))


EVERY = [(a.collective, a.name, n) for a in ALGORITHMS for n in (1, 2, 7, 16)]


def test_the_ring_is_printed(capsys: pytest.CaptureFixture[str]):
    assert main(["show", "ring"]) == 0
    assert capsys.readouterr().out == RING


def test_no_transfer_is_left_out():
    shown_text = shown("direct", "all_gather", 20)
    assert (
        shown_text.count(" -> ") == 20 * 19 + 1
    )  # one more in the line that explains the notation


def test_a_ranks_program_is_printed(capsys: pytest.CaptureFixture[str]):
    assert main(["show", "ring", "--program", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(RING + "\nrank 1, plain: 12 rows, least FIFO depth 1\n")
    assert out.endswith("\n\n" + FUSED)


@pytest.mark.parametrize(("collective", "name", "n"), EVERY)
def test_every_algorithm_fits_80_columns(collective: str, name: str, n: int):
    lines = shown(name, collective, n, program=n - 1).splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert lines[0].endswith(", proved")


@pytest.mark.parametrize(
    ("collective", "name", "n", "message"),
    [
        ("all_reduce", "direct", 8, "7/4 S"),
        ("broadcast", "binomial", 8, "0 to 3 S"),
        ("all_to_all", "pairwise", 4, "3/4 S"),
        ("all_reduce", "ring", 1, "0 S"),
    ],
)
def test_bytes_sent_per_rank_are_printed(collective, name: str, n: int, message: str):
    assert sent(schedule(collective, name, n)) == message


def test_the_list_names_every_algorithm(capsys: pytest.CaptureFixture[str]):
    assert main(["show", "--list"]) == 0
    assert capsys.readouterr().out == listing() + "\n"
    lines = listing().splitlines()
    assert all(len(line) <= 80 for line in lines)
    found = []
    for line in lines[: lines.index("")]:
        if not line.startswith(" "):
            collective = line
        elif line[2] != " ":
            name, message = line.split(maxsplit=1)
            found.append((collective, name))
            assert message
    assert sorted(found) == sorted((a.collective, a.name) for a in ALGORITHMS)


def test_an_svg_and_a_page_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    svg, page = tmp_path / "a.svg", tmp_path / "a.html"
    arguments = ["hierarchical:2", "--ranks", "6", "--svg", str(svg), "--html", str(page)]
    assert main(["show", *arguments]) == 0
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert "<h1>hierarchical:2 all_reduce on 6 ranks</h1>" in page.read_text(encoding="utf-8")
    out = capsys.readouterr().out
    assert out.startswith("hierarchical:2 all_reduce on 6 ranks, proved\n")
    assert out.endswith(f"\n\nwrote {svg}\nwrote {page}\n")


@pytest.mark.parametrize(
    ("name", "message"), [("ring", ""), ("direct", "; chunks from 4 on are scratch")]
)
def test_the_notation_is_explained(name: str, message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["show", name]) == 0
    assert f"\nrank.chunk +> rank.chunk adds, -> replaces{message}\n\n" in capsys.readouterr().out


def test_a_refused_page_leaves_no_svg(tmp_path: Path):
    drawings = ["--svg", str(tmp_path / "a.svg"), "--html", str(tmp_path / "a.html")]
    assert main(["show", "ring", "--ranks", "65", *drawings]) == 2
    assert not list(tmp_path.iterdir())


MINE = """
from ringdp.schedule import Schedule, Transfer

def star(n):
    up = Schedule(n, 1, (tuple(Transfer(r, 0, 0, 0, reduce=True) for r in range(1, n)),))
    return up.then(up.transpose())

def twice(n):
    return star(n).then(star(n))

def other(n):
    return star

def raises(n):
    return star(n).rounds[2]
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(MINE, encoding="utf-8")
    return file


def test_a_user_defined_algorithm_is_shown(mine: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["show", f"{mine}:star", "--ranks", "3", "--program", "0"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{mine}:star all_reduce on 3 ranks, proved\n2 rounds, 1 chunk, ")
    assert "round 0: 1.0 +> 0.0  2.0 +> 0.0\nround 1: 0.0 -> 1.0  0.0 -> 2.0\n" in out


def test_a_wrong_schedule_is_refused_with_the_failing_transfer(
    mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "page.html"
    assert main(["show", f"{mine}:twice", "--ranks", "3", "--html", str(page)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "round 2, transfer 1.0 +> 0.0: counts 0.0+1.0+2.0 twice in" in captured.err
    assert "         1.0 +> 0.0  <-- here\n" in captured.err
    assert not page.exists()


def test_the_help_names_every_collective(capsys: pytest.CaptureFixture[str]):
    assert main(["show", "--help"]) == 0
    assert {*COLLECTIVES} <= set(re.findall(r"\w+", capsys.readouterr().out))


REFUSED = {
    "neither": ([], "either an ALGORITHM, such as ring, or --list"),
    "both": (["ring", "--list"], "either an ALGORITHM, such as ring, or --list"),
    "list of some": (["--list", "--collective", "gather"], "such as ring, or --list alone"),
    "terms of nothing": (["ring", "--beta", "1e-9"], "--beta changes what --cost prints; allowed"),
    "unknown": (["rng"], "no all_reduce algorithm 'rng'; there are ring, "),
    "a file of no name": (["mine:star"], "doubling, tree, hierarchical, and your own as FILE.py:"),
    "no time": (["ring", "--cost", "--beta", "-1"], "--beta is -1.0; allowed: a finite time, at"),
    "unknown there": (["ring", "--collective", "gather"], "there are direct, binomial"),
    "collective": (["ring", "--collective", "sum"], "--collective is 'sum'; allowed: all_reduce"),
    "no ranks": (["ring", "--ranks", "0"], "--ranks is 0; allowed: a whole number from 1 to 256"),
    "many ranks": (["ring", "--ranks", "257"], "--ranks is 257; allowed"),
    "no such rank": (["ring", "--program", "4"], "--program is 4; allowed: a rank from 0 to 3"),
    "nodes": (["hierarchical:3"], "hierarchical:3 needs a number of ranks per node that divides 4"),
    "svg nowhere": (["ring", "--svg", "/nowhere/a.svg"], "--svg: cannot write /nowhere/a.svg: No "),
    "html a directory": (["ring", "--html", "/tmp"], "--html: cannot write /tmp: Is a directory"),
    "a page too large": (
        ["direct", "--ranks", "64", "--html", "/dev/null"],
        "a replay shows at most 4096 slots; 64 ranks of 128 chunks",
    ),
    "one file": (
        ["ring", "--svg", "/tmp/ringdp-1", "--html", "/tmp/../tmp/ringdp-1"],
        "--svg and --html are both /tmp/../tmp/ringdp-1; allowed: two files",
    ),
    "file": (["/nowhere/mine.py:f"], "cannot read /nowhere/mine.py: No such file or directory"),
    "no name": (["MINE"], "names no function"),
    "no function": (["MINE:ring"], "has no function 'ring'; it has star, twice, other, raises"),
    "something else": (["MINE:other"], "returned <function star"),
    "raises": (["MINE:raises"], "raised IndexError: tuple index out of range (line 15)"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_refused_in_one_line(mine: Path, arguments: list[str], message: str, refused):
    given = [re.sub("^MINE", str(mine), argument) for argument in arguments]
    refused("show", *given, message=message)


def test_cost_counts_and_predicts(capsys):
    assert main(["show", "ring", "--ranks", "4", "--cost", "--alpha", "1e-6", "--beta", "0"]) == 0
    shown_text = capsys.readouterr().out
    assert "6 α + S (3/2 β + 3/4 γ + 6 bus)" in shown_text
    assert "alpha 1e-06 s   beta 0 s/B   gamma 2.5e-11 s/B   bus 0 s/B\n" in shown_text
    assert re.search(r"1,024 +6\.0", shown_text)
    assert max(map(len, shown_text.splitlines())) <= 80
