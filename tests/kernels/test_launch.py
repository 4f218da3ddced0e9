"""What a launch asks of Triton, by its own dispatch but for the compiler, and on which device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringdp.kernels.adamw import adamw_kernel
from ringdp.kernels.fold import BLOCK, fold_kernel, fold_triton
from ringdp.kernels.jit import Kernel, sixteens, variant_of
from ringdp.kernels.spans import tables
from ringdp.kernels.stochastic import keys, stochastic_round_kernel, stochastic_round_triton
from tests.kernels.dispatch import STREAM, Dispatch
from tests.kernels.inputs import Elsewhere

pytest.importorskip("triton")

ELEMS = 4096


def test_triton_is_asked_once_for_a_variant(dispatch: Dispatch) -> None:
    dispatch.over(fold_kernel, "ringdp.kernels.fold")
    parts, out = torch.zeros(3, 2 * ELEMS), torch.zeros(2 * ELEMS)

    def fold(parts: torch.Tensor, out: torch.Tensor) -> tuple[int, int]:
        """How often Triton was asked, and compiled."""
        asked, compiled = dispatch.asked, len(dispatch.compiled)
        fold_triton(parts, out, torch.float32)
        return dispatch.asked - asked, len(dispatch.compiled) - compiled

    assert fold(parts, out) == (1, 1)
    assert fold(parts, out) == (0, 0)
    assert fold(parts[:, :ELEMS], out[ELEMS:]) == (0, 0)  # another place and length
    assert fold(parts[:2], out) == (1, 1)
    assert fold(parts, out.bfloat16()) == (1, 1)
    assert fold(parts[:, 1 : ELEMS + 1], out[:ELEMS]) == (1, 1)
    assert fold(parts[:, : ELEMS + 2], out[: ELEMS + 2]) == (1, 1)  # its last two elements
    assert fold(parts[:, : ELEMS + 1], out[: ELEMS + 1]) == (1, 1)
    assert fold(parts[:, : ELEMS + 3], out[: ELEMS + 3]) == (0, 0)


def test_a_kept_variant_is_run_as_triton_runs_it(dispatch: Dispatch) -> None:
    """By addresses, which spare the launcher the question where a tensor is."""
    dispatch.over(fold_kernel, "ringdp.kernels.fold")
    for seed in range(3):
        parts, out = torch.full((3, ELEMS), float(seed)), torch.zeros(ELEMS)
        fold_triton(parts, out, torch.float32)
        grid, x, own, target, elems, stride, ranks, at, wide, block = dispatch.launched[-1]
        assert grid == (ELEMS // BLOCK, 1, 1)
        if seed == 0:  # by Triton
            assert x is own is parts  # no slice: the length is a multiple of 16
            assert target is out
        else:
            assert (x, own, target) == (parts.data_ptr(), parts.data_ptr(), out.data_ptr())
        assert (elems, stride, ranks, at, block) == (ELEMS, ELEMS, 3, 3, BLOCK)
        assert str(wide).removeprefix("torch.") in ("fp32", "float32")
    assert (dispatch.asked, len(dispatch.launched)) == (1, 3)


def test_another_seed_and_place_is_no_reason_to_compile(dispatch: Dispatch) -> None:
    dispatch.over(stochastic_round_kernel, "ringdp.kernels.stochastic")
    x, out = torch.zeros(ELEMS), torch.zeros(ELEMS, dtype=torch.bfloat16)
    for seed in range(100):
        stochastic_round_triton(x, out, keys(seed), offset=seed)
    for key in ((16, 1), (0, 32)):
        stochastic_round_triton(x, out, key, offset=1 << 40)
    assert len(dispatch.compiled) == 1


def test_a_length_of_sixteens_is_not_sliced() -> None:
    x, y = torch.zeros(3, 32), torch.zeros(32)
    assert [(0, 32, (x, y))] == list(sixteens(x, y))
    cut = [(f, n, [t.shape for t in parts]) for f, n, parts in sixteens(x[:, 1:], y[1:])]
    assert cut == [(0, 16, [(3, 16), (16,)]), (16, 15, [(3, 15), (15,)])]
    assert not list(sixteens(y[:0]))


def test_launches_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current, ran = [0], []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kernel = Kernel(lambda: None, (), {}, capturable=False)
    there = torch.zeros(4).as_subclass(Elsewhere)
    kernel.function = {(5,): lambda x, **_: ran.append((x, current[0]))}
    kernel.launch(5, there)
    assert current == [0]
    assert ran == [(there, 1)]


def test_a_cuda_graph_may_hold_only_what_it_may_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    there = torch.zeros(4).as_subclass(Elsewhere)
    with pytest.raises(RuntimeError, match=r"adamw_kernel.*capture of a CUDA graph"):
        adamw_kernel.launch(1, there)
    with pytest.raises(RuntimeError, match=r"tables of addresses .* capture of a CUDA graph"):
        tables([there], torch.device("cuda"))
    ran = []
    kernel = Kernel(fold_kernel.fn, (), {}, capturable=fold_kernel.capturable)
    kernel.function = {(1,): lambda x, **_: ran.append(x)}
    kernel.launch(1, there)
    assert ran == [there]


def launcher(calls: list[object]) -> Any:
    """Triton's own, of a kernel that needs no scratch memory, but for the driver."""
    made = object.__new__(import_module("triton.backends.nvidia.driver").CudaLauncher)
    names = ("global_scratch_size", "global_scratch_align", "profile_scratch_size")
    vars(made).update(dict.fromkeys((*names, "profile_scratch_align"), 0), num_ctas=1)
    vars(made).update(launch_cooperative_grid=False, launch_pdl=False)
    vars(made).update(arg_annotations=["a"], kernel_signature=b"s")  # from 3.7 on
    made.launch = lambda *given: calls.append(given)
    return made


WHERE = 3, 1, 1, STREAM, 7
COMPILED = SimpleNamespace(function=7, packed_metadata=(4, 1, 0))


def test_a_variant_calls_what_tritons_launcher_does() -> None:
    """Without the launcher, which takes longer."""
    calls = list[object]()
    COMPILED.run = launcher(calls)
    found = variant_of(COMPILED, (1 << 40, 16, 0.5, torch.float32, 1024))
    assert not calls
    assert found.run is not COMPILED.run
    for late in (0.5, 0.25):
        arguments = 1 << 40, 32, late, torch.float32, 1024
        COMPILED.run(*WHERE, COMPILED.packed_metadata, None, None, None, *arguments)
        found.run(*WHERE, *found.middle, *arguments)
    assert len(calls) == 4
    assert calls[::2] == calls[1::2]


def test_a_launcher_that_is_not_understood_is_called_itself() -> None:
    class Other:
        launch = print

        def __call__(self, *given: object) -> None:
            self.launch(given[::-1])

    for run in (print, Other()):
        COMPILED.run = run
        assert variant_of(COMPILED, (1, 2)) == (run, 7, ((4, 1, 0), None, None, None))
