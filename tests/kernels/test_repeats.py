"""A call whose tensors lie where an earlier call's did: it repeats the launch and the refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple

import pytest
import torch

from ringdp.kernels import adamw, flatten, fold, repeats, stochastic_round, unflatten, unscale
from ringdp.kernels.jit import Kernel, Launch
from ringdp.kernels.norm import squared_norm_triton
from ringdp.kernels.repeats import Repeats, key, seen
from tests.kernels.conftest import KERNELS
from tests.kernels.dispatch import Dispatch
from tests.kernels.inputs import OnSecondGpu

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
for_every_kernel = pytest.mark.parametrize("name", CALLS)


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[Repeats]:
    """Empty caches of all kernels; all tensors pass for CUDA tensors."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    modules = {call.module for call in CALLS.values()} - {"copying"} | {"flatten", "unflatten"}
    made = [Repeats() for _ in modules | {"norm"}]
    for module, fresh in zip(modules | {"norm"}, made, strict=True):
        monkeypatch.setattr(import_module(f"ringdp.kernels.{module}"), "_repeats", fresh)
    return made


def replace_kernel(dispatch: Dispatch, module: str) -> None:
    module = f"ringdp.kernels.{module}"
    (kernel,) = (x for x in KERNELS if x.fn.__module__ == module)
    dispatch.replace_kernel(kernel, module)


@for_every_kernel
def test_a_repeated_call_makes_the_same_launch(
    dispatch: Dispatch, caches: list[Repeats], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module, call, (first, second), _ = CALLS[name]
    replace_kernel(dispatch, module)
    call(first)  # by Triton
    for memory in caches:
        memory.__init__()  # type: ignore[misc]
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
def test_repeated_calls_refuse_wrong_values(
    dispatch: Dispatch, caches: list[Repeats], name: str
) -> None:
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
    caches: list[Repeats],
    call: Callable[[], object],
    wrong: Callable[[], object],
) -> None:
    for module in ("fold", "unscale", "stochastic", "adamw", "copying"):
        replace_kernel(dispatch, module)
    for _ in range(2):
        call()
    with pytest.raises(ValueError, match=r"."):
        wrong()


def test_repeated_norms_return_new_tensors(dispatch: Dispatch, caches: list[Repeats]) -> None:
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


def test_repeated_launches_keep_their_chunk_tables_alive(
    dispatch: Dispatch, caches: list[Repeats]
) -> None:
    replace_kernel(dispatch, "copying")
    replace_kernel(dispatch, "norm")
    for _ in range(2):
        flatten(LIST, FLAT, offsets=PLACES)
        unflatten(FLAT, LIST, offsets=PLACES)
        squared_norm_triton(LIST)
    held = {x.data_ptr() for memory in caches for _, kept in memory._kept.values() for x in kept}
    assert {launched[1] for launched in dispatch.launched[3:]} == held


def test_repeated_calls_of_odd_length_make_two_launches(
    dispatch: Dispatch, caches: list[Repeats]
) -> None:
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


def test_offsets_across_2_to_the_32_make_two_launches(
    dispatch: Dispatch, caches: list[Repeats]
) -> None:
    replace_kernel(dispatch, "stochastic")
    half = 1 << 32
    for offset in (5, half - 16, half - 16, 2 * half + 5):
        stochastic_round(FLAT, HALF, seed=1, offset=offset)
    across = [(16, half - 16), (ELEMS - 16, 0)]
    assert [x[3:5] for x in dispatch.launched] == [(ELEMS, 5), *across, *across, (ELEMS, 5)]
    assert len({x[5] for x in dispatch.launched}) == 3  # one key per upper half


def test_keys_differ_in_all_that_a_launch_depends_on() -> None:
    flat = torch.zeros(64)
    parts = [flat[:16].view(4, 4), torch.nn.Parameter(flat[16:32]), flat[32:32]]
    places = [0, 16, 32]
    same = [x.view_as(x) for x in parts]
    others = [
        (parts, None),
        (parts, [0, 16, 33]),
        (parts[:2], [0, 16]),
        ([flat[:16], *parts[1:]], places),
        ([flat[:16].view(4, 4).t(), *parts[1:]], places),
        ([flat[:15], *parts[1:]], places),
        ([flat[1:17], *parts[1:]], places),
        ([flat[:16].view(torch.int32).view(4, 4), *parts[1:]], places),
    ]
    for ask in (seen, repeats._described):
        assert ask(parts, places) == ask(same, places)
        assert len({ask(parts, places), None, *(ask(*other) for other in others)}) == 10


def test_tensors_without_a_fast_key_get_a_slow_one() -> None:
    flat = torch.zeros(64)
    slow = [[flat.as_subclass(OnSecondGpu)], [flat.cfloat()], [None]]
    assert {seen(x, None) for x in slow} == {None}  # type: ignore[arg-type]
    assert seen([flat], [1 << 70]) is None
    complex_ = [flat.cfloat()]
    assert key(complex_) == key(complex_) != key([complex_[0][1:]])


def test_there_is_no_key_on_another_device_or_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    there, current, stream, capturing = torch.zeros(4).as_subclass(OnSecondGpu), [1], [5], [False]
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: stream[0], raising=False
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    assert key([there]) is not None
    capturing[0] = True
    assert key([there]) is None
    stream[0] = 0  # the default stream is never captured
    assert key([there]) is not None
    current[0] = 0
    assert key([there]) is None


def test_launches_on_another_device_are_not_kept() -> None:
    launch, memory = Launch(print, (), ()), Repeats()
    for launches in ([None], [launch, None]):
        memory.keep((1,), launches)
        assert not memory.again((1,))
    memory.keep(None, [launch])
    assert not memory.again(None)


def test_kept_calls_are_limited_in_number_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Repeats()

    def kept() -> list[int]:
        return [i for i in range(10) if memory.again((i,))]

    for i in range(6):
        memory.keep((i,), [], [torch.zeros(1)])
    assert kept() == [0, 1, 2, 3, 4, 5]
    monkeypatch.setattr(repeats, "KEPT", 3)
    memory.keep((6,), [], [torch.zeros(1)])
    assert kept() == [4, 5, 6]
    monkeypatch.setattr(repeats, "KEPT_BYTES", 12)
    memory.keep((7,), [], [torch.zeros(2)])
    assert kept() == [6, 7]
    memory.keep((8,), [], [torch.zeros(100)])
    assert kept() == [8]


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
