"""README's code runs, and its tables and figures are generated from the results."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import readme
from ringdp.cli.main import main
from tests import scripts

TEXT = readme.README.read_text(encoding="utf-8")
PAGES = (readme.README, *sorted((readme.ROOT / "docs").glob("*.md")))
# --standalone picks a free port, so several jobs can run at the same time.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_figure_and_tables_are_current():
    assert readme.FIGURE.read_text(encoding="utf-8") == readme.figure()
    pages = {page: page.read_text(encoding="utf-8") for page in readme.PAGES}
    for page, text in pages.items():
        assert readme.render(page) == text, "run: python -m bench.readme"
    parts = re.findall(r"<!-- (\w+) -->", "".join(pages.values()))
    assert sorted(parts) == sorted(readme.PARTS)


def test_make_targets_named_in_the_readme_exist():
    makefile = (readme.ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?m)(?:^|`)make (\w+)", TEXT):
        assert f"\n{target}:" in makefile


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_linked_files_and_headings_exist(page: Path):
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:ringdp|csrc|kernels|bench)/[\w/.]*)`", text):
        assert (readme.ROOT / path).exists(), path
    for path, heading in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
        there = page.parent / path if path else page
        assert there.exists(), path
        assert not heading or heading in anchors(there.read_text(encoding="utf-8")), heading


def anchors(text: str) -> list[str]:
    """The anchors that GitHub makes from headings."""
    heads = re.findall(r"(?m)^#+ (.*)", text)
    return [re.sub(r"[^\w\s-]", "", head).strip().lower().replace(" ", "-") for head in heads]


def test_the_drawing_example_prints_rounds_and_rows(capsys: pytest.CaptureFixture[str]):
    (block,) = [b for b in BLOCKS if "project(" in b]
    exec(block, {})
    output = capsys.readouterr().out
    assert "round 5:" in output
    assert "recv_reduce_copy_send" in output


def test_the_kernel_example_adds_rows_in_their_order():
    (block,) = [b for b in BLOCKS if "fold(" in b]
    names: dict[str, torch.Tensor] = {}
    exec(block, names)
    want = names["parts"][0].clone()
    for row in names["parts"][1:]:
        want += row
    assert torch.equal(names["out"], want)


def test_the_custom_algorithm_example_is_proved_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (block,) = [b for b in BLOCKS if "def star" in b]
    (command,) = re.findall(r"(?m)^ringdp (show mine.py:.*?) +#", TEXT)
    assert len(block.splitlines()) < 15
    (tmp_path / "mine.py").write_text(block, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 0
    output = capsys.readouterr().out
    assert output.startswith("mine.py:star all_reduce on 5 ranks, proved\n2 rounds, 1 chunk")
    assert "<svg" in (tmp_path / "star.html").read_text(encoding="utf-8")


def write_script(name: str, directory: Path) -> Path:
    (block,) = [b for b in BLOCKS if name in b]
    script = directory / "your_script.py"
    script.write_text(block, encoding="utf-8")
    return script


@pytest.mark.process
def test_the_sharding_example_runs_under_torchrun(tmp_path: Path):
    script = write_script("stage=3", tmp_path)
    logs = f"--log-dir={tmp_path}"  # torchrun does not remove its own folder for them
    subprocess.run([*TORCHRUN, logs, str(script)], check=True, timeout=600)


@pytest.mark.process
@pytest.mark.parametrize("block", [b for b in BLOCKS if re.search(r"(?m)^\S*init\w*\(", b)])
def test_examples_run_on_two_ranks(tmp_path: Path, block: str):
    script = tmp_path / "your_script.py"
    script.write_text(block, encoding="utf-8")
    scripts.run(script)


@pytest.mark.process
def test_the_timing_loop_of_the_speed_page_runs(tmp_path: Path):
    (block,) = re.findall(
        r"```python\n(.*?)```", readme.SPEED.read_text(encoding="utf-8"), re.DOTALL
    )
    (tmp_path / "loop.py").write_text(block, encoding="utf-8")
    output, _ = scripts.run(tmp_path / "loop.py")
    assert output.startswith("1,048,576 bytes: ")


@pytest.mark.process
@pytest.mark.parametrize("name", ["DistributedDataParallel", "stage=3"])
def test_examples_run_in_one_process_without_a_launcher(tmp_path: Path, name: str):
    scripts.run(write_script(name, tmp_path), ranks=0)


@pytest.mark.process
def test_the_tracing_example_gives_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (command,) = re.findall(r"(?m)^ringdp (report run.json .*?) +#", TEXT)
    scripts.run(write_script("ringdp.trace(", tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 0
    assert "<canvas" in (tmp_path / "run.html").read_text(encoding="utf-8")


def test_the_sed_command_changes_the_line_shown_in_the_diff():
    (change, script) = re.findall(r"(?m)^sed '(.*)' (\S+) >", TEXT)[0]
    (diff,) = re.findall(r"```diff\n-(.*)\n\+(.*)\n```", TEXT)
    command = ["sed", change, str(readme.ROOT / script)]
    changed = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout
    example = (readme.ROOT / script).read_text(encoding="utf-8")
    assert changed == example.replace(*diff) != example


@pytest.mark.process
def test_changing_the_import_gives_the_same_parameters(tmp_path: Path):
    (diff,) = re.findall(r"```diff\n-(.*)\n\+(.*)\n```", TEXT)
    example = (readme.ROOT / "examples" / "digits.py").read_text(encoding="utf-8")
    assert example.count(diff[0]) == 1
    script = tmp_path / "digits.py"
    output = []
    for line in diff:
        script.write_text(example.replace(diff[0], line), encoding="utf-8")
        output.append(scripts.run(script)[0])
    assert output[0] == output[1], "accuracy and parameters"
    assert float(re.search(r"accuracy ([\d.]+)", output[0])[1]) > 0.9


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="other torch, other tests")
@pytest.mark.parametrize("room", ["parallel/ddp", "comm/backend"])
def test_the_numbers_of_torchs_own_tests_are_current(room: str):
    path = f"tests/{room}/test_torchs_bodies.py"
    bodies = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    numbers = len(set(bodies.NAMES) - set(bodies.NOT_HERE)), len(bodies.NAMES)
    said = re.search(rf"(\d+) of (\d+),[^()]*\(`python -m pytest {path}`\)", TEXT)
    assert said is not None
    assert said.groups() == tuple(map(str, numbers))
