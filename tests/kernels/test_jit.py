"""Triton's interpreter is used where asked for, and the tests' is removed after each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringdp.kernels.adamw import adamw_kernel
from tests import scripts

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
