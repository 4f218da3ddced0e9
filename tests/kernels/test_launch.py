"""What launches request of Triton, through its own dispatch with a stub compiler; and on which
device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ringdp.kernels.adamw import adamw_kernel
from ringdp.kernels.fold import BLOCK, fold_kernel, fold_triton
from ringdp.kernels.jit import Kernel, sixteens
from ringdp.kernels.spans import tables
from ringdp.kernels.stochastic import keys, stochastic_round_kernel, stochastic_round_triton
from tests.kernels.dispatch import STREAM, Dispatch
from tests.kernels.inputs import OnSecondGpu

pytest.importorskip("triton")

ELEMS = 4096


def test_triton_is_called_once_per_variant(dispatch: Dispatch) -> None:
    dispatch.replace_kernel(fold_kernel, "ringdp.kernels.fold")
    parts, out = torch.zeros(3, 2 * ELEMS), torch.zeros(2 * ELEMS)

    def fold(parts: torch.Tensor, out: torch.Tensor) -> tuple[int, int]:
        """How many requests to Triton, and how many compilations, the call made."""
        requested, compiled = dispatch.requested, len(dispatch.compiled)
        fold_triton(parts, out, torch.float32)
        return dispatch.requested - requested, len(dispatch.compiled) - compiled

    assert fold(parts, out) == (1, 1)
    assert fold(parts, out) == (0, 0)
    assert fold(parts[:, :ELEMS], out[ELEMS:]) == (0, 0)  # another address and length
    assert fold(parts[:2], out) == (1, 1)
    assert fold(parts, out.bfloat16()) == (1, 1)
    assert fold(parts[:, 1 : ELEMS + 1], out[:ELEMS]) == (1, 1)
    # the last two elements are a launch of their own
    assert fold(parts[:, : ELEMS + 2], out[: ELEMS + 2]) == (1, 1)
    assert fold(parts[:, : ELEMS + 1], out[: ELEMS + 1]) == (1, 1)
    assert fold(parts[:, : ELEMS + 3], out[: ELEMS + 3]) == (0, 0)


def test_a_kept_variant_is_launched_with_the_same_arguments(dispatch: Dispatch) -> None:
    """By the driver, which gets no constants, on the current stream."""
    dispatch.replace_kernel(fold_kernel, "ringdp.kernels.fold")
    for seed in range(3):
        parts, out = torch.full((3, ELEMS), float(seed)), torch.zeros(ELEMS)
        fold_triton(parts, out, torch.float32)
        grid, x, own, target, elems, stride, one, *constants = dispatch.launched[-1]
        assert grid == (ELEMS // BLOCK, 1, 1)
        if seed == 0:  # the first launch goes through Triton
            assert x is own is parts  # not sliced: the length is a multiple of 16
            assert target is out
            assert constants[:2] == [3, 3]
        else:
            assert (x, own, target) == (parts.data_ptr(), parts.data_ptr(), out.data_ptr())
        assert (elems, stride, one) == (ELEMS, ELEMS, 1.0)
    assert (dispatch.requested, len(dispatch.launched)) == (1, 3)
    assert dispatch.streams == [STREAM, STREAM]


def test_an_integer_has_the_variant_that_triton_would_compile(dispatch: Dispatch) -> None:
    """By whether it is 1, whether 16 divides it, and its type."""
    kernel = dispatch.replace_kernel(fold_kernel, "ringdp.kernels.fold")
    x, constants = torch.zeros(16), {"RANKS": 1, "AT": 1, "WIDE": torch.float32, "BLOCK": BLOCK}
    for elems, new in (
        (16, 1),
        (32, 0),
        (17, 1),
        (33, 0),
        (1, 1),
        (1 << 31, 1),
        ((1 << 31) + 1, 1),
        (1 << 63, 1),
        ((1 << 63) + 1, 1),
    ):
        compiled = len(dispatch.compiled)
        kernel.launch(1, x, x, x, elems, 16, 1.0, **constants)
        assert len(dispatch.compiled) - compiled == new


def test_other_seeds_and_offsets_need_no_compilation(dispatch: Dispatch) -> None:
    dispatch.replace_kernel(stochastic_round_kernel, "ringdp.kernels.stochastic")
    x, out = torch.zeros(ELEMS), torch.zeros(ELEMS, dtype=torch.bfloat16)
    for seed in range(100):
        stochastic_round_triton(x, out, keys(seed), offset=seed)
    for key in ((16, 1), (0, 32)):
        stochastic_round_triton(x, out, key, offset=1 << 40)
    assert len(dispatch.compiled) == 1


def test_lengths_are_split_at_a_multiple_of_16() -> None:
    x, y = torch.zeros(3, 32), torch.zeros(32)
    assert [(0, 32, (x, y))] == list(sixteens(x, y))
    cut = [(f, n, [t.shape for t in parts]) for f, n, parts in sixteens(x[:, 1:], y[1:])]
    assert cut == [(0, 16, [(3, 16), (16,)]), (16, 15, [(3, 15), (15,)])]
    assert not list(sixteens(y[:0]))


def test_a_kernel_is_launched_on_its_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
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
    there = torch.zeros(4).as_subclass(OnSecondGpu)
    kernel.function = {(5,): lambda x, **_: ran.append((x, current[0]))}
    kernel.launch(5, there)
    assert current == [0]
    assert ran == [(there, 1)]


def test_another_device_has_variants_of_its_own(
    dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's handle of one is valid there only."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    dispatch.replace_kernel(fold_kernel, "ringdp.kernels.fold")
    parts, out = torch.zeros(3, ELEMS), torch.zeros(ELEMS)
    there = parts.as_subclass(OnSecondGpu), out.as_subclass(OnSecondGpu)
    for requested, given in ((1, (parts, out)), (2, there), (2, there), (2, (parts, out))):
        fold_triton(*given, torch.float32)
        assert dispatch.requested == requested


def test_kernels_that_a_graph_must_not_repeat_are_refused_in_a_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    there = torch.zeros(4).as_subclass(OnSecondGpu)
    with pytest.raises(RuntimeError, match=r"adamw_kernel.*capture of a CUDA graph"):
        adamw_kernel.launch(1, there)
    with pytest.raises(RuntimeError, match=r"tables of addresses .* capture of a CUDA graph"):
        tables([there], torch.device("cuda"), block=lambda _: 4096)
    ran = []
    kernel = Kernel(fold_kernel.fn, (), {}, capturable=fold_kernel.capturable)
    kernel.function = {(1,): lambda x, **_: ran.append(x)}
    kernel.launch(1, there)
    assert ran == [there]


def test_a_thread_without_a_context_is_left_to_triton(dispatch: Dispatch) -> None:
    """Its launcher makes one."""
    dispatch.replace_kernel(fold_kernel, "ringdp.kernels.fold")
    for context, requested in ((1, 1), (1, 1), (None, 2), (1, 2)):
        dispatch.driver.context = context
        fold_triton(torch.zeros(3, ELEMS), torch.zeros(ELEMS), torch.float32)
        assert dispatch.requested == requested
    assert len(dispatch.launched) == 4
