"""Which calls `Repeats` repeats, and how many it keeps."""

from __future__ import annotations

from ctypes import (
    CFUNCTYPE,
    POINTER,
    PYFUNCTYPE,
    addressof,
    c_char_p,
    c_int,
    c_void_p,
    cast,
    memmove,
    py_object,
    pythonapi,
    sizeof,
)
from typing import Any

import pytest
import torch

from ringdp import _core
from ringdp._core import Launch
from ringdp.kernels import repeats
from ringdp.kernels.repeats import Repeats
from tests.kernels.driver import StandIn
from tests.kernels.inputs import OnSecondGpu


@pytest.fixture
def made() -> list[int]:
    """How many launches `launch` made of each function."""
    return []


@pytest.fixture
def stand_in(made: list[int]) -> StandIn:
    return StandIn(lambda given: made.append(given.function))


@pytest.fixture
def launch(stand_in: StandIn) -> Launch:
    return Launch(stand_in.driver, 7, 1, 32, 0, "", ())


def test_calls_differ_in_all_that_a_launch_depends_on(launch: Launch, made: list[int]) -> None:
    flat = torch.zeros(64)
    parts = [flat[:16].view(4, 4), torch.nn.Parameter(flat[16:32]), flat[32:32], flat[40]]
    places = [0, 16, 32, 40]
    others = [
        (parts, None),
        (parts, [0, 16, 32, 41]),
        (parts[:2], [0, 16]),
        ([flat[:16], *parts[1:]], places),
        ([flat[:16].view(4, 4).t(), *parts[1:]], places),
        ([flat[:15], *parts[1:]], places),
        ([flat[1:17], *parts[1:]], places),
        ([flat[:16].view(torch.int32).view(4, 4), *parts[1:]], places),
        ([flat[:16].view(torch.uint32).view(4, 4), *parts[1:]], places),
        ([flat[:16].view(torch.complex32).view(4, 4), *parts[1:]], places),
    ]
    memory = Repeats()
    for call in ((parts, places), *others):
        assert not memory.again(*call, ())
        memory.keep(*call, [launch])
    assert not made
    assert memory.again([x.view_as(x) for x in parts], tuple(places), ())
    assert made == [7]


def test_tensors_that_cannot_be_read_are_not_repeated(launch: Launch) -> None:
    flat, memory = torch.zeros(64), Repeats()
    memory.keep([flat], None, [launch])
    for tensors, offsets in (
        ([flat.as_subclass(OnSecondGpu)], None),
        ([None], None),
        ([flat], [1 << 70]),
        ([flat], ["1"]),
    ):
        memory.keep(tensors, offsets, [launch])  # type: ignore[arg-type]
        assert not memory.again(tensors, offsets, ())  # type: ignore[arg-type]
    z = torch.zeros(1, 2, dtype=torch.complex64)
    memory.keep([z.imag], None, [launch])
    assert memory.again([z.imag], None, ())
    assert not memory.again([z.conj().imag], None, ())  # lazily negated, at the same address


def on_stream(stream: list[int]) -> Any:
    """The functions of torch's tensors, with another current stream."""
    table = (c_void_p * 7)()
    memmove(table, pointer_of(torch.Tensor.__dlpack_c_exchange_api__, NAME), sizeof(table))

    @CFUNCTYPE(c_int, c_int, c_int, POINTER(c_void_p))
    def current(device: int, number: int, out: Any) -> int:
        out[0] = stream[0]
        return 0

    table[6] = cast(current, c_void_p).value
    return table, current


NAME = b"dlpack_exchange_api"
pointer_of = PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", pythonapi))
capsule_of = PYFUNCTYPE(py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", pythonapi))


def test_calls_are_not_repeated_elsewhere_nor_in_a_capture(
    launch: Launch, stand_in: StandIn
) -> None:
    stream = [5]
    table, _current = on_stream(stream)
    capsule = capsule_of(addressof(table), NAME, None)
    memory = _core.Repeats(capsule, torch.Tensor, torch.nn.Parameter, 10, 0)
    call = [torch.zeros(4)], None

    def again() -> bool:
        return memory.again(*call, ())

    stand_in.capturing = 1
    memory.keep(*call, [launch])
    stand_in.capturing = 0
    assert not again()
    memory.keep(*call, [launch])
    assert again()
    stand_in.capturing = 1
    assert not again()
    stream[0] = 0  # the default stream is never captured
    assert not again()
    memory.keep(*call, [launch])
    assert again()
    for context in (2, None):  # another device's, and a new thread
        stand_in.context = context
        assert not again()


def test_launches_on_another_device_are_not_kept(launch: Launch) -> None:
    memory, call = Repeats(), ([torch.zeros(4)], None)
    for launches in ([None], [launch, None], []):
        memory.keep(*call, launches)
        assert not memory.again(*call, ())


def test_kept_calls_are_limited_in_number_and_bytes(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.zeros(4)

    def of(memory: Repeats) -> list[int]:
        return [i for i in range(10) if memory.again([x], [i], ())]

    def keep(memory: Repeats, i: int, held: int) -> None:
        memory.keep([x], [i], [launch], [torch.zeros(held)])

    memory = Repeats()
    for i in range(6):
        keep(memory, i, 1)
    assert of(memory) == [0, 1, 2, 3, 4, 5]
    monkeypatch.setattr(repeats, "KEPT", 3)
    monkeypatch.setattr(repeats, "KEPT_BYTES", 12)
    memory = Repeats()
    for i in (0, 1, 2, 3, 3):
        keep(memory, i, 1)
    assert of(memory) == [1, 2, 3]
    keep(memory, 4, 2)
    assert of(memory) == [3, 4]
    keep(memory, 5, 100)
    assert of(memory) == [5]
