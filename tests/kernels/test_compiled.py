"""How the driver is asked to launch compiled kernels, and which ones are left to Triton."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringdp._core import Launch
from ringdp.kernels import jit
from ringdp.kernels.compiled import PLAIN, variant_of
from ringdp.kernels.fold import fold_kernel, fold_triton
from tests.kernels.dispatch import Compiled, Dispatch
from tests.kernels.driver import Given, StandIn

pytest.importorskip("triton")

ELEMS = 4096
SIGNATURE = {"x": "*fp32", "n": "i32", "one": "constexpr", "scale": "fp64", "BLOCK": "constexpr"}


def test_the_driver_is_given_the_arguments_that_are_no_constants() -> None:
    """And null pointers for the scratch memory that the kernel does not need."""
    found = variant_of(Compiled([], SIGNATURE), ("scale",))
    assert found
    assert found[1:] == (128, 0, "iid00", (0, 1))
    limited = Compiled([], SIGNATURE)
    limited.asm = {"ptx": limited.asm["ptx"].replace("128\n", "128\n.maxnreg 64\n")}
    assert variant_of(limited, ("scale",))[1:] == found[1:]


@pytest.mark.parametrize(
    "other",
    [
        *({"metadata": SimpleNamespace(**PLAIN | {name: 2}, shared=0)} for name in PLAIN),
        {"metadata": SimpleNamespace(shared=0)},
        {"src": SimpleNamespace(signature=SIGNATURE | {"scale": "fp32"})},
        {"src": SimpleNamespace(signature=SIGNATURE | {"n": "fp16"})},
        {"src": SimpleNamespace(signature=[*SIGNATURE])},
        {"src": SimpleNamespace()},
        {"asm": {}},
        {"asm": {"ptx": ".visible .entry f(.param .b64 x, .param .b32 n)\n.reqntid 32\n{}"}},
    ],
)
def test_a_kernel_that_is_not_as_expected_is_left_to_triton(
    dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    """As one that another version of Triton compiles may be."""
    made = Compiled([], SIGNATURE)
    vars(made).update(other)
    assert variant_of(made, ("scale",)) is None
    dispatch.replace_kernel(fold_kernel, "ringdp.kernels.fold")
    asked = list[Any]()
    monkeypatch.setattr(jit, "variant_of", lambda *given: asked.append(given))
    for times in (1, 2):
        assert fold_triton(torch.zeros(3, ELEMS), torch.zeros(ELEMS), torch.float32) == [None]
        assert dispatch.requested == len(dispatch.launched) == times
    assert len(asked) == 1  # its code is read once


def test_more_parameters_than_arguments_are_null_only_if_they_are_pointers() -> None:
    made = Compiled([], SIGNATURE)
    for end, right in ((".b64 y", True), (".b32 y", False), (".align 8 .b8 y[8]", False)):
        made.asm = {
            "ptx": f".entry f(.param .b64 x, .param .b32 n, .param .f64 s, .param {end})\n"
            ".reqntid 32\n{}"
        }
        assert (variant_of(made, ("scale",)) is not None) == right


def test_arguments_are_packed_as_the_kernel_reads_them() -> None:
    given = list[Given]()
    bits = list[int]()

    def act(x: Given) -> None:
        given.append(x)
        bits[:] = x.bits([64, 32, 32, 64, 32, 64, 64])

    driver = StandIn(act).driver
    launch = Launch(driver, 1 << 40, 3, 128, 512, "iifdi00", ((1 << 63) + 16, 5))
    for _ in range(2):
        assert launch.run(1 << 41, (0.1, 0.1, (1 << 32) - 1))
        floats = (
            int.from_bytes(struct.pack("<f", 0.1), "little"),
            *struct.unpack("<Q", struct.pack("<d", 0.1)),
        )
        assert bits == [(1 << 63) + 16, 5, *floats, (1 << 32) - 1, 0, 0]
    assert given[0][:5] == (1 << 40, (3, 1, 1), (128, 1, 1), 512, 1 << 41)
    assert launch.run(0, (1, 2, 3))
    assert given[-1].stream is None
    with pytest.raises(TypeError):
        launch.run(0, (0.1, "1", 1))
    for wrong in ((0.1, 0.1), (0.1, 0.1, 1, 0)):  # the null pointers are not given
        with pytest.raises(ValueError, match=f"takes 5 arguments, not {2 + len(wrong)}"):
            launch.run(0, wrong)
    with pytest.raises(ValueError, match="too many arguments"):
        Launch(driver, 1, 1, 32, 0, "i0", (1, 2))
    assert len(given) == 3


def test_errors_of_the_driver_are_raised_as_triton_does() -> None:
    def act(_: Given) -> None:
        raise OSError("an illegal memory access")

    stand_in = StandIn(act)
    launch = Launch(stand_in.driver, 7, 1, 32, 0, "", ())
    with pytest.raises(RuntimeError, match=r"Triton Error \[CUDA\]: .*an illegal memory access"):
        launch.run(0, ())
