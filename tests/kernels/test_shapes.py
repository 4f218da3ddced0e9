"""`bench.shapes`: other launch shapes give the same results, and leave the kernels as they are."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from bench import shapes
from bench.shapes import OWN, SWEEPS, Case, Shape, measure, shaped
from ringdp.cli.bench.kernels import Timer, by_the_clock
from ringdp.kernels import norm
from ringdp.kernels.norm import squared_norm_kernel

CPU = torch.device("cpu")
ELEMS = 20_000


@pytest.fixture
def fresh(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that are loaded anew run in the interpreter, too."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def load(case: Case, shape: Shape) -> ModuleType:
        module = shaped(case, shape)
        kernel = getattr(module, case.kernel)
        assert kernel.function is not None  # its first use makes `tl` visible to the kernel
        vars(kernel)["function"] = interpreter.InterpretedFunction(kernel.fn)
        return module

    monkeypatch.setattr(shapes, "shaped", load)


@pytest.mark.parametrize("name", SWEEPS)
def test_every_shape_gives_the_same_result(fresh: None, name: str) -> None:
    rows, wrong = measure(name, ELEMS, CPU, 1, Timer(by_the_clock, 1))
    assert not wrong
    assert [row.shape for row in rows] == [OWN, *map(str, SWEEPS[name].shapes)]
    assert all(0 < row.min_us <= row.p50_us <= row.max_us for row in rows)


def test_a_wrong_result_and_an_error_are_reported(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def doubled(module: ModuleType, elems: int, device: torch.device) -> Callable[[], torch.Tensor]:
        call, factor = shapes.unscale(module, elems, device), 1 + (module.BLOCK == 512)
        return lambda: call() * factor

    tried = [Shape({"BLOCK": 512}), Shape({"BLOCK": 500})]
    case = SWEEPS["unscale"]._replace(call=doubled, shapes=tried)
    monkeypatch.setitem(SWEEPS, "unscale", case)
    _, said = measure("unscale", ELEMS, CPU, 1, Timer(by_the_clock, 1))
    assert said["BLOCK 512"] == "its result is off by 1.0"
    assert "power of 2" in said["BLOCK 500"]


def test_a_shape_is_that_of_a_copy_of_the_module() -> None:
    before = dict(squared_norm_kernel.options)
    other = shaped(SWEEPS["squared_norm"], Shape({"PROGRAMS": 5}, {"maxnreg": 64}))
    assert (other.PROGRAMS, other.squared_norm_kernel.options["maxnreg"]) == (5, 64)
    assert norm.PROGRAMS != 5
    assert squared_norm_kernel.options == before
    assert other._repeats is not norm._repeats
