"""How parameters are grouped into units: rules, tied weights, nesting, and wrong rules."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ringdp
from ringdp.parallel.units import find_units


def owned(model: nn.Module, rule=None) -> dict[str, list[str]]:
    return {f.name: [n for n, _ in f.parameters] for f in find_units(model, rule)[0]}


def linear() -> nn.Linear:
    return nn.Linear(2, 2, bias=False)


def on_a_gpu() -> nn.Linear:
    """A fake one; no GPU is needed."""
    made = linear()
    with FakeTensorMode():
        made.weight = nn.Parameter(torch.empty(2, 2, device="cuda:0"))
    return made


class Model(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def test_by_default_the_entries_of_lists_are_units():
    net = Model(head=linear(), blocks=nn.ModuleList([linear(), nn.Sequential(linear(), linear())]))
    assert owned(net) == {
        "": ["head.weight"],
        "blocks.0": ["blocks.0.weight"],
        "blocks.1": ["blocks.1.0.weight", "blocks.1.1.weight"],
    }


def test_the_root_is_a_unit_even_without_parameters():
    assert owned(nn.Sequential(linear(), nn.ReLU())) == {"": [], "0": ["0.weight"]}
    assert owned(linear()) == {"": ["weight"]}


def test_containers_are_looked_through():
    inner = nn.ModuleList([linear(), nn.ModuleDict({"a": linear()})])
    listed = nn.ParameterList([nn.Parameter(torch.ones(2))])
    net = Model(blocks=nn.ModuleList([inner, listed]))
    assert owned(net) == {
        "": ["blocks.0.1.a.weight", "blocks.1.0"],
        "blocks.0.0": ["blocks.0.0.weight"],
    }


def test_a_rule_can_be_a_class_classes_or_a_predicate():
    net = Model(a=linear(), b=nn.LayerNorm(2, bias=False), c=nn.Sequential(linear()))
    assert list(owned(net, nn.Linear)) == ["", "a", "c.0"]
    assert list(owned(net, (nn.LayerNorm, nn.Sequential))) == ["", "b", "c"]
    assert list(owned(net, lambda m: isinstance(m, nn.LayerNorm))) == ["", "b"]


@pytest.mark.parametrize("rule", [nn.Linear, 6])
def test_a_layer_that_attention_never_calls_is_no_unit(rule):
    assert list(owned(nn.MultiheadAttention(2, 1), rule)) == [""]
    net = nn.Sequential(nn.MultiheadAttention(2, 1, bias=False), linear())
    assert owned(net, rule) == {
        "": ["0.in_proj_weight", "0.out_proj.weight"],
        "1": ["1.weight"],
    }


def test_a_parameter_belongs_to_the_innermost_unit():
    net = Model(outer=Model(inner=linear(), own=nn.LayerNorm(2, bias=False)))
    assert owned(net, (Model, nn.Linear)) == {
        "": [],
        "outer": ["outer.own.weight"],
        "outer.inner": ["outer.inner.weight"],
    }


def test_weights_tied_between_units_belong_to_the_root():
    a, b = linear(), linear()
    b.weight = a.weight
    assert owned(nn.Sequential(a, b, linear())) == {"": ["0.weight"], "2": ["2.weight"]}


def test_a_module_shared_by_units_belongs_to_the_root():
    common = linear()
    net = nn.Sequential(nn.Sequential(linear(), common), nn.Sequential(common, linear()))
    assert owned(net) == {"": ["0.1.weight"], "0": ["0.0.weight"], "1": ["1.1.weight"]}


def test_weights_tied_within_a_unit_stay_there():
    a, b = linear(), linear()
    b.weight = a.weight
    assert owned(nn.ModuleList([nn.Sequential(a, b)])) == {"": [], "0": ["0.0.weight"]}


def test_a_unit_registered_twice_is_one():
    a = linear()
    assert owned(nn.Sequential(a, linear(), a)) == {"": [], "0": ["0.weight"], "1": ["1.weight"]}


def test_frozen_parameters_have_no_gradients_to_be_cast():
    model, casts = nn.Sequential(linear().half()), ringdp.Precision(torch.float64, torch.float32)
    with pytest.raises(ringdp.UsageError, match="would round twice"):
        find_units(model, None, precisions={model: casts})
    assert len(find_units(model.requires_grad_(False), None, precisions={model: casts})) == 2


@pytest.mark.parametrize(
    ("model", "rule", "message"),
    [
        (nn.ReLU(), None, "no parameter"),
        (nn.Sequential(linear()), nn.Sequential, "matches no module within the model; it has Lin"),
        (linear(), nn.Linear, "matches no module within the model; it has no modules"),
        (Model(b=nn.ModuleList([linear()])), nn.ModuleList, "ModuleList cannot be a unit"),
        (nn.Sequential(linear()), {nn.Linear}, "allowed in a set: modules of the model"),
        (
            nn.Sequential(linear().to("meta"), linear(), on_a_gpu()),
            None,
            "1.weight is on cpu, 2.weight on cuda:0",
        ),
        (
            Model(p=nn.ParameterList([torch.ones(2, dtype=torch.complex64)])),
            None,
            "p.0 is torch.complex64; parameters must be floats",
        ),
        (
            Model(p=nn.ParameterList(2 * [torch.ones(3)])),
            None,
            "p.0 and p.1 are two parameters in the same memory",
        ),
        (
            nn.Sequential(linear(), torch.jit.ScriptModule()),
            None,
            "module 1 is a torch.jit.ScriptModule, which takes no hooks",
        ),
        (
            nn.Sequential(linear(), nn.Embedding(3, 2, max_norm=1.0)),
            None,
            "module 1 has max_norm=1.0",
        ),
        (  # it may train later
            nn.Sequential(linear(), nn.Embedding(3, 2, max_norm=1.0).requires_grad_(False)),
            None,
            "module 1 has max_norm=1.0",
        ),
        (nn.Sequential(linear(), nn.LazyLinear(2)), None, "1.weight has no shape yet"),
        (
            nn.Sequential(linear(), nn.LazyBatchNorm1d(affine=False)),
            None,
            "1.running_mean has no shape yet",
        ),
    ],
)
def test_wrong_models_and_rules_are_refused(model, rule, message):
    with pytest.raises(ringdp.UsageError) as error:
        find_units(model, rule)
    assert message in str(error.value)
