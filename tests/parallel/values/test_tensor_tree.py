"""Which tensors are found in the outputs of a module."""

from __future__ import annotations

from collections import deque
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.distributions import Independent, Normal

from ringdp.parallel.values.tensor_tree import DEEP, map_tensors, tensors


def test_tensors_are_found_in_nested_objects():
    mean, scale = torch.zeros(2), torch.ones(2)
    found = list(tensors({"policy": [Independent(Normal(mean, scale), 1)]}))
    assert any(t is mean for t in found)
    assert any(t is scale for t in found)


class Slotted:
    __slots__ = ("x", "y")

    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_tensors_are_found_in_slots_functions_and_torchs_containers():
    x = torch.zeros(2)
    functions = (lambda: x + 1, partial(torch.add, x), partial(torch.add, other=x))
    for held in (Slotted(x), *functions, deque([x])):
        (found,) = tensors(held)
        assert found is x


def nested(x: Tensor, deep: int) -> object:
    return SimpleNamespace(inner=[nested(x, deep - 1)]) if deep else x


def test_unrelated_objects_are_not_searched():
    x = torch.zeros(2)
    assert list(tensors(nested(x, DEEP))) == [x]
    assert list(tensors(nested(x, DEEP + 1))) == []
    assert list(tensors(SimpleNamespace(library=torch, of=Tensor))) == []
    around = SimpleNamespace(x=x)
    around.itself = around
    assert list(tensors(around)) == [x]


def test_containers_without_tensors_are_not_copied():
    x, aux, whole = torch.zeros(2), [torch.ones(1)], {"a": [torch.ones(1)], "b": None}
    given = (x, aux, {"aux": aux, "x": [x]}, whole)
    made = map_tensors(torch.neg, given, which=lambda t: t is x)
    assert made[1] is aux
    assert made[2]["aux"] is aux
    assert made[3] is whole
    assert given[0] is given[2]["x"][0] is x
    assert made[0] is not x
    assert made[2]["x"][0] is not x
    assert map_tensors(torch.neg, given, which=lambda _: False) is given
