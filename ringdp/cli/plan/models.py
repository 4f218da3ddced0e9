"""The planned model as units of parameters: by name, by size, or built on the meta device.

Named transformers have their published layout, with one unit per block. Everything outside the
blocks (embeddings, the last norm, the head) belongs to the root.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from ringdp.errors import UsageError
from ringdp.parallel.accounting.memory import Widths, widths_of
from ringdp.parallel.layout import Unit, layout
from ringdp.parallel.offload import Offload
from ringdp.parallel.precision import Dtypes, Precision, dtypes
from ringdp.parallel.units import find_units
from ringdp.schedule.custom import load, said

DEFAULT_UNITS = 32  # of a model given by its size only
MOST_PARAMETERS = 10**14
MOST_UNITS = 1_000

Parameters = tuple[tuple[str, int], ...]  # name, elements


class Part(NamedTuple):
    """A unit: its name ("" for the root), its parameters and their dtypes."""

    name: str
    parameters: Parameters
    dtypes: Dtypes
    trainable: bool = True


class Model(NamedTuple):
    """`groups` lists the units of each module, the root's first."""

    name: str
    parts: tuple[Part, ...]
    groups: tuple[tuple[int, ...], ...]

    @property
    def elements(self) -> int:
        return sum(elements for part in self.parts for _, elements in part.parameters)

    @property
    def units(self) -> int:
        """Their number, without a root that has no parameters."""
        return sum(bool(part.parameters) for part in self.parts)

    @property
    def widths(self) -> list[Widths]:
        return [widths_of(p.dtypes, Offload(), trainable=p.trainable) for p in self.parts]

    def layout(self, ranks: int, replicas: int = 1) -> tuple[Unit, ...]:
        return layout([(p.name, p.parameters) for p in self.parts], ranks, replicas)

    def scaled(self, elements: int) -> Model:
        """The same model with about `elements` elements.

        All parameters are scaled by one factor and rounded up, so that none becomes empty.
        """
        old = self.elements
        parts = [
            p._replace(parameters=tuple((n, -(-e * elements // old)) for n, e in p.parameters))
            for p in self.parts
        ]
        return self._replace(parts=tuple(parts))


def _gpt(blocks: int, d: int) -> list[Parameters]:
    """Radford et al. 2019, of width d: learned positions, biases, a tied head. The root first."""
    norm = (("norm.weight", d), ("norm.bias", d))
    root = (("token", 50257 * d), ("position", 1024 * d), *norm)
    wide = [("query_key_value", d, 3 * d), ("attention_out", d, d)]
    wide += [("mlp_in", d, 4 * d), ("mlp_out", 4 * d, d)]
    linears = [(f"{n}.weight", i * o) for n, i, o in wide]
    linears += [(f"{n}.bias", o) for n, _, o in wide]
    norms = [(f"norm_{i}.{w}", d) for i in (1, 2) for w in ("weight", "bias")]
    return [root, *[(*linears, *norms)] * blocks]


def _llama(
    blocks: int, d: int, hidden: int, *, vocabulary: int = 32000, key_value: int | None = None
) -> list[Parameters]:
    """Touvron et al. 2023, of width d; `key_value` is the width of keys and values."""
    root = (("token", vocabulary * d), ("norm.weight", d), ("head.weight", vocabulary * d))
    kv = key_value or d
    attention = [("query", d * d), ("key", d * kv), ("value", d * kv), ("out", d * d)]
    mlp = [(name, d * hidden) for name in ("gate", "up", "down")]
    return [root, *[(*attention, *mlp, ("norm_1", d), ("norm_2", d))] * blocks]


NAMED = {
    "gpt2": _gpt(12, 768),
    "gpt2-medium": _gpt(24, 1024),
    "gpt2-large": _gpt(36, 1280),
    "gpt2-xl": _gpt(48, 1600),
    "llama-7b": _llama(32, 4096, 11008),
    "llama-13b": _llama(40, 5120, 13824),
    "llama-70b": _llama(80, 8192, 28672, key_value=1024),
    "llama3-8b": _llama(32, 4096, 14336, vocabulary=128256, key_value=1024),
}


def read(given: str, precision: Precision) -> Model:
    """Parse a name, `params=7e9`, `params=7e9/48` (in 48 equal units), or `FILE.py:factory`.

    Raises UsageError for anything else, and if a factory makes no trainable module.
    """
    if given in NAMED:
        return _flat(given, NAMED[given], precision)
    if given.startswith("params="):
        return _sized(given, precision)
    if given.rpartition(":")[0].endswith(".py"):
        return of_module(given, _built(given), precision)
    raise UsageError(
        f"--model is {given!r}; allowed: {', '.join(NAMED)}, params=7e9, params=7e9/48 (units), "
        "or FILE.py:factory"
    )


def of_module(name: str, module: nn.Module, precision: Precision) -> Model:
    """A module's units, as `ringdp.shard` makes them if no unit is given."""
    found, _ = find_units(module, None, precisions={module: precision})
    parts, groups = [], dict[nn.Module, list[int]]()
    for index, unit in enumerate(found):
        sizes = tuple((n, p.numel()) for n, p in unit.parameters)
        parts.append(Part(unit.name, sizes, unit.dtypes, unit.trained))
        groups.setdefault(unit.module, []).append(index)
    if not any(elements for part in parts for _, elements in part.parameters):
        raise UsageError(f"--model: {name}() made no parameter of any element; allowed: some")
    return Model(name, tuple(parts), tuple(tuple(g) for g in groups.values()))


def _flat(name: str, units: Sequence[Parameters], precision: Precision) -> Model:
    kind = dtypes(torch.float32, kept=False, precision=precision)
    names = ["", *(f"blocks.{i}" for i in range(len(units) - 1))]
    parts = [Part(n, u, kind, bool(u)) for n, u in zip(names, units, strict=True)]
    return Model(name, tuple(parts), tuple((i,) for i in range(len(parts))))


def _sized(given: str, precision: Precision) -> Model:
    match = re.fullmatch(r"params=(\d+(?:\.\d*)?(?:e\+?\d+)?)(?:/(\d{1,9}))?", given, re.IGNORECASE)
    elements = float(match[1]) if match else 0.0
    units = int(match[2] or DEFAULT_UNITS) if match else 0
    if not (1 <= units <= MOST_UNITS and units <= elements <= MOST_PARAMETERS):
        raise UsageError(
            f"--model is {given!r}; allowed: params=7e9, which is in {DEFAULT_UNITS} units, or "
            f"params=7e9/48; at most {MOST_PARAMETERS:.0e} parameters in at most {MOST_UNITS} "
            "units of at least one each"
        )
    ends = [i * int(elements) // units for i in range(units + 1)]
    each = [(("weight", b - a),) for a, b in pairwise(ends)]
    return _flat(given, [(), *each], precision)


def _built(given: str) -> nn.Module:
    factory = load(given)
    try:
        with torch.device("meta"):
            made: object = factory()  # type: ignore[call-arg]  # a Builder takes n
    except (Exception, SystemExit) as error:
        file = given.rpartition(":")[0]
        raise UsageError(f"--model: {given}() raised {said(error, file)}") from error
    if not isinstance(made, nn.Module):
        raise UsageError(
            f"--model: {given}() returned {type(made).__name__}; allowed: a torch.nn.Module"
        )
    return made
