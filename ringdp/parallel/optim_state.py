"""The state_dict of an optimizer that steps slices: of whole parameters, as in one process.

What it keeps for each element is gathered unit by unit; of single values, such as Adam's step, the
first rank's that has one is taken. Where it loads one, it keeps its slices of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from ringdp.comm import Communicator
from ringdp.errors import UsageError
from ringdp.parallel.cut import Slices
from ringdp.parallel.guards import sliced
from ringdp.parallel.replicas import gather_json


class Whole(Protocol):
    """Who has the other slices: an engine."""

    comm: Communicator
    closed: bool

    @property
    def units(self) -> Sequence[Slices]: ...

    @property
    def gathers_state(self) -> bool: ...


_BELONG: WeakSet[Optimizer] = WeakSet()  # optimizers whose hooks are there


def belong(optimizer: Optimizer, whole: Whole) -> None:
    """It is about to step slices for the first time, or those of another engine. Raises UsageError
    for state of other ones."""
    keep_slices(optimizer, whole.units)
    if optimizer not in _BELONG:
        _BELONG.add(optimizer)
        optimizer.register_state_dict_post_hook(_saved)
        optimizer.register_load_state_dict_post_hook(_loaded)


def _wholes(optimizer: Optimizer) -> list[Whole | None]:
    return sliced.wholes(p for group in optimizer.param_groups for p in group["params"])


def _saved(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    for engine in _wholes(optimizer):
        if engine is None or engine.closed or not engine.gathers_state:
            raise UsageError(
                "state_dict of a sharded model's optimizer: what it keeps is of this rank's flat "
                "slices. Use ringdp.save and ringdp.load, which take the optimizer, too, or call "
                "it within full_parameters(), on every rank"
            )
        state = state | {"state": gathered(engine.comm, engine.units, optimizer, state["state"])}
    return state


def _loaded(optimizer: Optimizer) -> None:
    for engine in _wholes(optimizer):
        if engine is not None and not engine.closed:
            keep_slices(optimizer, engine.units)


def keep_slices(optimizer: Optimizer, units: Sequence[Slices]) -> None:
    """State of whole parameters, which a load_state_dict or a step before shard has left, becomes
    of this rank's slices."""
    for unit in units:
        for entry, p, shape in zip(
            unit.plan.entries, unit.parameters, unit.cut.shapes, strict=True
        ):
            begin, end = unit.plan.part(entry, unit.rank)
            state = optimizer.state.get(p, {})
            for name, value in list(state.items()):
                if not isinstance(value, Tensor) or _is_slice(name, value, end - begin):
                    continue
                if name != "step" and value.shape == shape:
                    state[name] = value.reshape(-1)[begin:end].clone()
                elif value.numel() > 1:
                    raise UsageError(
                        f"the {type(optimizer).__name__} has state {name!r} of shape "
                        f"{list(value.shape)} for parameter {entry.name} of {list(shape)}, and its "
                        f"slice of {end - begin} elements; allowed: one value for each element, or "
                        "one for all"
                    )
            if begin == end:
                optimizer.state.pop(p, None)


def gathered(
    comm: Communicator,
    units: Sequence[Slices],
    optimizer: Optimizer,
    state: dict[Any, Any],
    root: int | None = None,
) -> dict[Any, Any]:
    """`state` of slices, by the number of the parameter, whole; where there is a `root`, on other
    ranks meta tensors. Collective."""
    places = {id(p): (unit, at) for unit in units for at, p in enumerate(unit.parameters)}
    numbered = [p for group in optimizer.param_groups for p in group["params"]]
    mine = [
        [number, name, *_told(name, value, unit.cut.spans[at][1] - unit.cut.spans[at][0])]
        for number, values in state.items()
        for unit, at in [places.get(id(numbered[number]), (None, 0))]
        if unit
        for name, value in values.items()
    ]
    whole = {n: dict(values) for n, values in state.items() if id(numbered[n]) not in places}
    views: dict[tuple[int, str, str], list[Tensor]] = {}
    for facts in gather_json(comm, mine):
        for number, name, dtype, shape, value in facts:
            unit, at = places[id(numbered[number])]
            if name in whole.setdefault(number, {}):
                continue
            if dtype is not None and shape is None:
                key = unit.index, name, dtype
                if key not in views:
                    views[key] = _gather(comm, unit, optimizer, name, getattr(torch, dtype), root)
                value = views[key][at]
            elif dtype is not None:
                value = torch.tensor(value, dtype=getattr(torch, dtype)).view(shape)
            whole[number][name] = value
    return dict(sorted(whole.items()))


def _is_slice(name: str, value: Tensor, elements: int) -> bool:
    """Of so many."""
    return name != "step" and value.shape == (elements,)


def _told(name: str, value: Any, elements: int) -> tuple[str | None, list[int] | None, Any]:
    """What others must know: a tensor's dtype, and of a single value its shape and itself."""
    if not isinstance(value, Tensor):
        return None, None, value
    dtype = str(value.dtype).removeprefix("torch.")
    if _is_slice(name, value, elements):
        return dtype, None, None
    if value.numel() > 1:
        raise UsageError(
            f"the optimizer's state {name!r} has shape {list(value.shape)} for a slice of "
            f"{elements} elements; allowed: one value for each element, or one for all"
        )
    return dtype, list(value.shape), value.tolist()


def _gather(
    comm: Communicator,
    unit: Slices,
    optimizer: Optimizer,
    name: str,
    dtype: torch.dtype,
    root: int | None,
) -> list[Tensor]:
    """Of every parameter of the unit; zeros where a rank has none."""
    own = torch.zeros(unit.plan.shard, dtype=dtype, device=unit.parameters[0].device)
    for p, (begin, end) in zip(unit.parameters, unit.cut.spans, strict=True):
        value = optimizer.state.get(p, {}).get(name)
        if value is not None and _is_slice(name, value, end - begin):
            own[begin:end] = value
    here = root in (None, comm.rank)
    full = own.new_empty(unit.plan.padded, device=own.device if here else "meta")
    if root is None:
        comm.all_gather(full, own, tag=unit.index)
    else:
        comm.gather(full, own, root, tag=unit.index)
    return unit.cut.whole(full)
