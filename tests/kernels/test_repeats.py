"""A call whose tensors lie where an earlier call's did: it repeats the launch and the refusals."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import pytest
import torch

from ringdp.kernels import adamw, flatten, fold, stochastic_round, unflatten, unscale
from ringdp.kernels.fold import fold_triton
from ringdp.kernels.jit import Kernel
from ringdp.kernels.norm import squared_norm_triton
from ringdp.kernels.repeats import Repeats
from tests.kernels.conftest import KERNELS
from tests.kernels.dispatch import Dispatch
from tests.kernels.driver import forget_calls

ELEMS = 4096
FLAT, GRAD, AVG, AVG_SQ = torch.zeros(4, ELEMS)
HALF, FOUND, PARTS = FLAT.bfloat16(), torch.zeros(1), torch.zeros(8, ELEMS)
LIST, PLACES = list(torch.zeros(4, 1024).unbind()), [0, 1024, 2048, 3072]
step = partial(adamw, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)


class Call(NamedTuple):
    module: str
    call: Callable[[Any], object]  # takes one of the values
    values: tuple[Any, Any]
    wrong: tuple[Any, ...]  # values that are refused


CALLS = {
    "fold": Call("fold", lambda rows: fold(PARTS[:rows], FLAT), (8, 8), (0,)),
    "fold with one elsewhere": Call(
        "fold", lambda at: fold(PARTS, FLAT, GRAD, at), (1, 1), (-1, 9)
    ),
    "unscale": Call(
        "unscale",
        lambda scale: unscale(FLAT, HALF, FOUND, scale=scale),
        (1.0, 0.5),
        (float("nan"), 1e39),
    ),
    "stochastic_round": Call(
        "stochastic",
        lambda seed: stochastic_round(FLAT, HALF, seed=seed, offset=seed),
        (1, 16),
        (-1, 1 << 63),
    ),
    "adamw": Call(
        "adamw", lambda t: step(FLAT, GRAD, AVG, AVG_SQ, step=t, copy=HALF), (1, 2), (0,)
    ),
    "flatten": Call(
        "copying",
        lambda scale: flatten(LIST, FLAT, scale=scale, offsets=PLACES),
        (1.0, -1.0),
        (float("inf"),),
    ),
    "unflatten": Call(
        "copying",
        lambda scale: unflatten(FLAT, LIST, scale=scale, offsets=PLACES),
        (1.0, -1.0),
        (-1e39,),
    ),
}
WRITTEN = {
    "fold": [FLAT],
    "fold with one elsewhere": [FLAT],
    "unscale": [HALF, FOUND],
    "stochastic_round": [HALF],
    "adamw": [FLAT, AVG, AVG_SQ, HALF],
    "flatten": [FLAT],
    "unflatten": LIST,
}
for_every_kernel = pytest.mark.parametrize("name", CALLS)


@pytest.fixture(autouse=True)
def all_pass_for_cuda_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)


def replace_kernel(dispatch: Dispatch, module: str) -> None:
    module = f"ringdp.kernels.{module}"
    (kernel,) = (x for x in KERNELS if x.fn.__module__ == module)
    dispatch.replace_kernel(kernel, module)


@for_every_kernel
def test_a_repeated_call_makes_the_same_launch(
    dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module, call, (first, second), _ = CALLS[name]
    replace_kernel(dispatch, module)
    call(first)  # by Triton
    forget_calls(monkeypatch)
    call(second)  # prepared again
    monkeypatch.setattr(Kernel, "launch", None)
    call(second)
    call(first)
    _, worked_out, again, other = dispatch.launched
    if "flatten" in name:  # each has its own table of chunks
        worked_out, again, other = (x[:1] + x[2:] for x in (worked_out, again, other))
    assert again == worked_out
    assert (other == again) == (first == second)


@for_every_kernel
def test_autograd_sees_every_write(dispatch: Dispatch, name: str) -> None:
    module, call, (value, _), _ = CALLS[name]
    replace_kernel(dispatch, module)
    for _ in range(3):  # by Triton, prepared, repeated
        before = [x._version for x in WRITTEN[name]]
        call(value)
        assert all(x._version > v for x, v in zip(WRITTEN[name], before, strict=True))
    assert len(dispatch.launched) == 3


def test_compiled_code_launches_and_repeats(
    dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile would not believe that a CPU tensor is a GPU's, as `fold` does here."""
    replace_kernel(dispatch, "fold")
    repeats, again = Repeats(), list[bool]()

    @torch.compile(backend="eager")
    def folded() -> bool:
        if repeats.again([PARTS, FLAT], [0], (1.0,)):
            return True
        repeats.keep([PARTS, FLAT], [0], fold_triton(PARTS, FLAT, torch.float32))
        return False

    for _ in range(3):
        again.append(folded())
    assert again == [False, True, True]
    assert len(dispatch.launched) == 3


@for_every_kernel
def test_repeated_calls_refuse_wrong_values(dispatch: Dispatch, name: str) -> None:
    module, call, (value, _), wrong = CALLS[name]
    replace_kernel(dispatch, module)
    for _ in range(2):
        call(value)
    for bad in wrong:
        with pytest.raises(ValueError, match=r"."):
            call(bad)
    assert len(dispatch.launched) == 2


def refused() -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
    """Pairs of a valid call and an invalid one with tensors at the same addresses."""
    square, row = PARTS[0].view(64, 64), FLAT[:64]
    yield partial(fold, square[:4], row), partial(fold, square.view(32, 128)[:2], row)
    yield partial(fold, square[:4], row), partial(fold, square.t()[:4], row)
    yield partial(fold, square[:4], row, row, 4), partial(fold, square[:4], row, row, 5)
    scaled = partial(unscale, FLAT, scale=1.0)
    yield partial(scaled, HALF, FOUND), partial(scaled, HALF, FOUND.view(()))
    yield partial(scaled, HALF, FOUND), partial(scaled, HALF.view(64, 64), FOUND)
    rounded = partial(stochastic_round, FLAT, seed=1)
    yield partial(rounded, HALF), partial(rounded, HALF.view(torch.float16))
    stepped = partial(step, FLAT, step=1)
    whole = (GRAD, AVG, AVG_SQ)
    yield partial(stepped, *whole), partial(stepped, GRAD[:64], *whole[1:])
    yield partial(stepped, *whole), partial(stepped, GRAD.view(torch.int32), *whole[1:])
    put = partial(flatten, LIST, FLAT)
    yield partial(put, offsets=PLACES), partial(put, offsets=[0, 1024, 2048, 3073])
    yield partial(put, offsets=PLACES), partial(flatten, LIST, FLAT[:64], offsets=PLACES)


@pytest.mark.parametrize(("call", "wrong"), list(refused()))
def test_other_tensors_at_the_same_addresses_are_checked(
    dispatch: Dispatch,
    call: Callable[[], object],
    wrong: Callable[[], object],
) -> None:
    for module in ("fold", "unscale", "stochastic", "adamw", "copying"):
        replace_kernel(dispatch, module)
    for _ in range(2):
        call()
    with pytest.raises(ValueError, match=r"."):
        wrong()


def test_repeated_norms_return_new_tensors(dispatch: Dispatch) -> None:
    replace_kernel(dispatch, "norm")
    totals = [squared_norm_triton(LIST) for _ in range(3)]
    places = [x.data_ptr() for x in totals]
    assert len(set(places)) == 3
    assert [launched[4] for launched in dispatch.launched[1:]] == places[1:]
    mixed = [*LIST, HALF]
    for _ in range(2):
        squared_norm_triton(mixed)
    assert dispatch.requested == 2
    assert len(dispatch.launched) == 7


def test_repeated_launches_keep_their_chunk_tables_alive(dispatch: Dispatch) -> None:
    replace_kernel(dispatch, "copying")
    replace_kernel(dispatch, "norm")
    for _ in range(2):
        flatten(LIST, FLAT, offsets=PLACES)
        unflatten(FLAT, LIST, offsets=PLACES)
        squared_norm_triton(LIST)
    del dispatch.launched[:3]  # Triton's, which hold the tables
    tables = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.dtype == torch.int64]
    used = {launched[1] for launched in dispatch.launched}
    assert len(used) == 3
    assert used <= {x.data_ptr() for x in tables}


def test_repeated_calls_of_odd_length_make_two_launches(dispatch: Dispatch) -> None:
    """An odd length takes two launches; where they round at random, each has its own offset."""
    for module in ("fold", "stochastic"):
        replace_kernel(dispatch, module)
    odd = ELEMS - 1
    for _ in range(3):
        fold(PARTS[:, :odd], FLAT[:odd])
        stochastic_round(FLAT[:odd], HALF[:odd], seed=1, offset=100)
    where = (4, 4, 3, 3) * 3  # index of the length, behind the grid and the tensors
    grids = [launched[i : i + 2] for i, launched in zip(where, dispatch.launched, strict=True)]
    assert (
        grids == [(ELEMS - 16, ELEMS), (15, ELEMS), (ELEMS - 16, 100), (15, 100 + ELEMS - 16)] * 3
    )


def test_offsets_across_2_to_the_32_make_two_launches(dispatch: Dispatch) -> None:
    replace_kernel(dispatch, "stochastic")
    half = 1 << 32
    for offset in (5, half - 16, half - 16, 2 * half + 5):
        stochastic_round(FLAT, HALF, seed=1, offset=offset)
    across = [(16, half - 16), (ELEMS - 16, 0)]
    assert [x[3:5] for x in dispatch.launched] == [(ELEMS, 5), *across, *across, (ELEMS, 5)]
    assert len({x[5] for x in dispatch.launched}) == 3  # one key per upper half


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.fn.__name__)
def test_unspecialized_arguments_are_the_last(kernel: Kernel) -> None:
    """A repeated launch replaces values by their position: after all others and before the
    constants."""
    kinds = {name: str(x.annotation) for name, x in signature(kernel.fn).parameters.items()}
    arguments = [name for name, kind in kinds.items() if kind != "tl.constexpr"]
    last = arguments[len(arguments) - len(kernel.unspecialized) :]
    assert tuple(last) == kernel.unspecialized
    assert list(kinds)[: len(arguments)] == arguments
    of_one_type = {"tl.float32", "tl.float64", "tl.int64", "tl.uint32"}
    assert {kinds[name] for name in last} <= of_one_type or last == ["total"]  # a float64[]
