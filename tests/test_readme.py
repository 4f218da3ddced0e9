"""README's code runs, and what it shows of results is generated from them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import readme

TEXT = (readme.ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_figure_and_tables_are_current():
    assert readme.FIGURE.read_text() == readme.figure()
    assert readme.render(TEXT) == TEXT, "run: python -m bench.readme"


def test_the_commands_it_names_exist():
    makefile = (readme.ROOT / "Makefile").read_text()
    for target in re.findall(r"(?m)(?:^|`)make (\w+)", TEXT):
        assert f"\n{target}:" in makefile


def test_the_files_it_names_exist():
    for path in re.findall(r"`((?:ringdp|csrc|kernels|bench)/[\w/.]*)`", TEXT):
        assert (readme.ROOT / path).exists(), path


def test_a_schedule_is_drawn_and_projected():
    (block,) = [b for b in BLOCKS if "project(" in b]
    run = subprocess.run(
        [sys.executable, "-c", block], capture_output=True, text=True, check=True
    ).stdout
    assert "round 5:" in run
    assert "recv_reduce_copy_send" in run


def test_an_algorithm_of_ones_own_is_proved_and_replayed(tmp_path: Path):
    (block,) = [b for b in BLOCKS if "def star" in b]
    (command,) = re.findall(r"(?m)^ringdp (show mine.py:.*?) +#", TEXT)
    assert len(block.splitlines()) < 15
    (tmp_path / "mine.py").write_text(block)
    run = subprocess.run(
        [str(Path(sys.executable).with_name("ringdp")), *command.split()],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert run.stdout.startswith("mine.py:star all_reduce on 5 ranks, proved\n2 rounds, 1 chunk")
    assert "<svg" in (tmp_path / "star.html").read_text()


@pytest.mark.process
@pytest.mark.parametrize("name", ["DistributedDataParallel", "stage=3"])
def test_five_lines_run_under_torchrun(tmp_path: Path, name: str):
    (block,) = [b for b in BLOCKS if name in b]
    script = tmp_path / "your_script.py"
    script.write_text(block)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    subprocess.run([*command, str(script)], check=True, timeout=60)
    subprocess.run([sys.executable, str(script)], check=True, timeout=60)  # one process alone


@pytest.mark.process
def test_a_run_is_traced_and_reported(tmp_path: Path):
    (block,) = [b for b in BLOCKS if "ringdp.trace(" in b]
    (command,) = re.findall(r"(?m)^ringdp (report run.json .*?) +#", TEXT)
    (tmp_path / "your_script.py").write_text(block)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    subprocess.run([*launch, "your_script.py"], check=True, timeout=60, cwd=tmp_path)
    ours = str(Path(sys.executable).with_name("ringdp"))
    subprocess.run([ours, *command.split()], check=True, timeout=60, cwd=tmp_path)
    assert "<canvas" in (tmp_path / "run.html").read_text()


@pytest.mark.process
def test_torch_runs_over_the_backend(tmp_path: Path):
    (block,) = [b for b in BLOCKS if "init_process_group" in b]
    script = tmp_path / "your_script.py"
    script.write_text(block)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    subprocess.run([*command, str(script)], check=True, timeout=60)


@pytest.mark.process
def test_a_torch_script_needs_one_other_line(tmp_path: Path):
    (diff,) = re.findall(r"```diff\n-(.*)\n\+(.*)\n```", TEXT)
    example = (readme.ROOT / "examples" / "digits.py").read_text()
    assert example.count(diff[0]) == 1
    said = []
    for line in diff:
        script = tmp_path / "digits.py"
        script.write_text(example.replace(diff[0], line))
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        run = subprocess.run(
            [*command, str(script)], capture_output=True, text=True, check=True, timeout=120
        )
        said.append(run.stdout)
    assert said[0] == said[1], "accuracy and parameters"
    assert float(re.search(r"accuracy ([\d.]+)", said[0])[1]) > 0.9
