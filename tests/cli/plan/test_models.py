"""Named models have their published sizes, and a factory's model has the engine's units."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ringdp.cli.plan.models import NAMED, read
from ringdp.errors import UsageError
from ringdp.parallel.precision import Precision

HERE = Path(__file__).with_name("models_here.py")
FLOAT32 = Precision()

# as published by the models' authors and in their checkpoints
SIZES = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
}


def test_named_models_have_their_published_sizes():
    assert {name: read(name, FLOAT32).elements for name in NAMED} == SIZES


@pytest.mark.parametrize(
    ("given", "elements", "units"),
    [("params=7e9", 7 * 10**9, 32), ("params=7.5e9/3", 75 * 10**8, 3), ("params=10/4", 10, 4)],
)
def test_a_number_of_parameters_is_split_into_nearly_equal_units(given, elements, units):
    model = read(given, FLOAT32)
    sizes = [sum(e for _, e in part.parameters) for part in model.parts]
    assert sizes[0] == 0, "the root has no parameters"
    assert len(sizes[1:]) == model.units == units
    assert sum(sizes) == model.elements == elements
    assert max(sizes[1:]) - min(sizes[1:]) <= 1


def test_a_factorys_model_takes_no_memory():
    model = read(f"{HERE}:huge", Precision(param=torch.bfloat16))
    assert model.elements == 4 * 10**11
    assert [w.compute for w in model.widths] == [4, 2, 2], "the root has no parameters"


def test_scaling_keeps_the_layout():
    model = read("gpt2", FLOAT32)
    twice = model.scaled(2 * model.elements)
    assert twice.elements == 2 * model.elements
    assert [p.name for p in twice.parts] == [p.name for p in model.parts]
    assert model.scaled(model.elements) == model
    small = model.scaled(1)
    assert {e for p in small.parts for _, e in p.parameters} == {1}, "no parameter has 0 elements"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gpt3", "--model is 'gpt3'; allowed: gpt2, "),
        ("params=many", "allowed: params=7e9, which is in 32 units, or params=7e9/48; at most"),
        ("params=7e9/0", "allowed: params=7e9, which"),
        ("params=3/4", "of at least one each"),
        ("params=7e9/1001", "in at most 1000 units"),
        ("params=1e20", "at most 1e+14 parameters"),
        ("/nowhere/m.py:net", "cannot read /nowhere/m.py: No such file"),
        (
            f"{HERE}:absent",
            "has no function 'absent'; it has net, huge, number, lazy, needs, raising, empty",
        ),
        (f"{HERE}:empty", "empty() made no parameter of any element; allowed: some"),
        (f"{HERE}:number", "number() returned int; allowed: a torch.nn.Module"),
        (f"{HERE}:lazy", "weight has no shape yet; give its lazy module a batch first"),
        (f"{HERE}:needs", "needs() raised TypeError: needs() missing 1 required positional arg"),
        (f"{HERE}:raising", "raising() raised KeyError: 'no such shape' (line 40)"),
    ],
)
def test_unusable_models_are_refused(given, message):
    with pytest.raises(UsageError) as error:
        read(given, FLOAT32)
    assert message in str(error.value)
