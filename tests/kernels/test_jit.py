"""Triton is imported only when needed, and the tests' interpreter is removed after each test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ringdp.kernels.adamw import adamw_kernel
from tests import scripts

USE = """
import sys, torch
from ringdp.kernels import (
    adamw, flatten, fold, squared_norm, stochastic_round, unflatten, unscale
)
x = [torch.ones(40) for _ in range(4)]
out = torch.empty(64)
flatten(x[:1], out, scale=0.5, offsets=[3])
fold(torch.ones(2, 40), x[0])
adamw(*x, step=1, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
unflatten(out, x[:1], offsets=[3])
unscale(out, out, torch.zeros(1), scale=0.5)
squared_norm(x)
stochastic_round(out, torch.empty(64, dtype=torch.bfloat16), seed=1)
assert "triton" not in sys.modules
"""
INTERPRET = """
import os, torch
os.environ["TRITON_INTERPRET"] = "1"
from ringdp.kernels.copying import copy_kernel
from ringdp.kernels.flatten import flatten_triton
out = torch.empty(10)
flatten_triton([torch.ones(8)], out, 0.5, [1])
assert out.tolist() == [0] + [0.5] * 8 + [0], out
assert type(copy_kernel.function).__name__ == "InterpretedFunction"
"""


def test_kernels_on_cpu_tensors_import_no_triton() -> None:
    done = subprocess.run(
        [sys.executable, "-c", USE], capture_output=True, encoding="utf-8", timeout=600
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.process
def test_triton_interpret_set_before_the_first_launch_is_obeyed(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (tmp_path / "interpret.py").write_text(INTERPRET, encoding="utf-8")
    scripts.run(tmp_path / "interpret.py", ranks=0)


def test_the_interpreted_fixture_restores_the_kernels(
    interpreted: None, request: pytest.FixtureRequest
) -> None:
    assert type(adamw_kernel.function).__name__ == "InterpretedFunction"
    request.getfixturevalue("monkeypatch").undo()
    assert type(adamw_kernel.function).__name__ == "JITFunction"
