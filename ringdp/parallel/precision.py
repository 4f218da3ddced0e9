"""Mixed precision: the dtypes of a parameter at rest, in forward and backward, and on the wire.

    master   at rest, for the optimizer: the dtype that the model was built with
    compute  in forward, backward and gathers: Precision.param
    reduce   of the gradient bucket that the ranks reduce: Precision.reduce

A gradient is made in `compute`, multiplied by 1/n and cast to `reduce`, summed over the ranks, and
cast to `master`. Modules named by `keep_fp32` compute in their master dtype. Modules within a model
may have a Precision of their own, which holds in all of them, whatever that around says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import nn

from ringdp.errors import UsageError

ModuleRule = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool]


def check_rule(name: str, rule: object, *others: str) -> None:
    """Raise UsageError unless it is a ModuleRule. `others`: what else the argument may be."""
    several = isinstance(rule, tuple) and all(isinstance(kind, type) for kind in rule)
    if not (several or callable(rule)):  # a class is callable
        allowed = ["a module class", "a tuple of them", "a predicate of modules", *others]
        raise UsageError(f"{name}={rule!r}: allowed: {', '.join(allowed[:-1])}, or {allowed[-1]}")


def matches(module: nn.Module, rule: ModuleRule) -> bool:
    if isinstance(rule, type | tuple):
        return isinstance(module, rule)
    return rule(module)


@dataclass(frozen=True)
class Precision:
    """Mixed precision. None leaves a dtype as it is (`reduce`: the compute dtype).

    param: dtype of parameters and activations in forward and backward. reduce: dtype of gradients
    while they are reduced. output: dtype that floating outputs of the model, or of the module that
    this is given for, are cast to. keep_fp32: a module class, several, or a predicate: these
    modules (layer norms, say) compute in the dtype they were built with; their inputs are cast to
    it, and their outputs to `param`. Since buffers keep their dtype, batch norms must be among
    them, and what `spectral_norm` and `orthogonal` of torch.nn.utils.parametrizations add, a
    ParametrizationList. cast_inputs: cast floating inputs of that module, and of every module
    chosen as a unit, to `param`; "model": of the model only.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    keep_fp32: ModuleRule | None = None
    cast_inputs: bool | Literal["model"] = True

    def __post_init__(self) -> None:
        for name in ("param", "reduce", "output"):
            dtype = getattr(self, name)
            floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            if not (dtype is None or floating):
                raise UsageError(f"Precision({name}={dtype!r}): allowed: a floating dtype, or None")
        if self.cast_inputs not in (True, False, "model"):
            raise UsageError(
                f"Precision(cast_inputs={self.cast_inputs!r}): allowed: True, False or 'model'"
            )
        if self.keep_fp32 is not None:
            check_rule("Precision(keep_fp32)", self.keep_fp32)


Precisions = dict[nn.Module, Precision]  # each for its module and what lies within


def of_modules(model: nn.Module, given: Precisions) -> dict[nn.Module, Precision]:
    """Each module's: that of the innermost one around it in `given`, but for `output`, which is
    that one's only. Raises UsageError for a module with parameters that lies in two with different
    ones."""
    at: dict[str, Precision] = {}
    of: dict[nn.Module, Precision] = {}
    for name, module in model.named_modules(remove_duplicate=False):  # outer modules first
        around = at.get(name.rpartition(".")[0]) or Precision()
        at[name] = replace(given[module], output=None) if module in given else around
        differs = of.setdefault(module, at[name]) != at[name]
        if differs and next(module.parameters(), None) is not None:
            raise UsageError(
                f"module {name} is part of two modules whose precisions are {of[module]} and "
                f"{at[name]}; allowed: the same for both, or one of its own"
            )
    return of


def check_precisions(model: nn.Module, given: Precisions) -> None:
    """Raise UsageError unless it gives modules of the model a Precision each."""
    modules = {*model.modules()}
    for at, precision in given.items():
        if at not in modules or not isinstance(precision, Precision):
            raise UsageError(
                f"shard(precision={{{type(at).__name__}: {precision!r}}}): allowed in a dict: "
                "modules of the model, and a Precision for each"
            )


def kept(of: Mapping[nn.Module, Precision]) -> tuple[list[nn.Module], set[nn.Module]]:
    """The outermost modules that keep their dtype, and these with all modules inside them that have
    no other precision."""
    found: list[nn.Module] = []
    within: set[nn.Module] = set()
    for module, precision in of.items():
        rule = precision.keep_fp32
        if rule is not None and module not in within and matches(module, rule):
            found.append(module)
            within.update(m for m in module.modules() if of[m] == precision)
    return found, within


class Dtypes(NamedTuple):
    """The dtypes of one unit's parameters."""

    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


def dtypes(master: torch.dtype, *, kept: bool, precision: Precision) -> Dtypes:
    """The dtypes of a parameter; `kept`: its module computes in the master dtype."""
    compute = master if kept or precision.param is None else precision.param
    return Dtypes(master, compute, precision.reduce or compute)
