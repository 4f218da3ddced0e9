"""The state_dict of an optimizer that steps slices: of whole parameters, as in one process.

State with one value for each element (Adam's exp_avg) is gathered unit by unit. Of state with one
value for the whole slice (Adam's step) the first rank that has one counts. load_state_dict takes
whole state, of which each rank keeps its slices.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ringdp.comm import Communicator
from ringdp.errors import UsageError
from ringdp.parallel.cut import SliceOwner, Slices
from ringdp.parallel.exchange import share
from ringdp.parallel.guards import sliced
from ringdp.parallel.optimizer.kinds import needs_whole
from ringdp.parallel.replicas import gather_json

_SLICE = "_ringdp_slice"
_TAKEN = WeakKeyDictionary[Optimizer, WeakSet[SliceOwner]]()  # whose slices each steps
# These keep state of slices, where parameters are whole by now: a WeakIdKeyDictionary of `_parts`.
_LEFT = WeakKeyDictionary[Optimizer, Any]()


def take(optimizer: Optimizer, owner: SliceOwner) -> None:
    """It steps slices of `owner`: from now on its state_dict is of whole parameters. State that it
    has of whole parameters is sliced; raises UsageError for state that cannot be, and for state of
    other slices."""
    if owner in _TAKEN.get(optimizer, ()):
        return
    parts = _parts(owner)
    if any(parts.get(p, part) != part for p, part in _left(optimizer).items()):
        raise UsageError(f"an optimizer has state of the slices before a close(). {_INSTEAD}")
    keep_slices(optimizer, owner.units)
    for p in parts:
        _LEFT.get(optimizer, {}).pop(p, None)
    # A wrapper of another optimizer, such as timm's Lookahead, may leave out Optimizer.__init__. It
    # has no hooks then, and its state_dict is that of the other one.
    if optimizer not in _TAKEN and hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
        optimizer.register_state_dict_post_hook(_saved)
        optimizer.register_load_state_dict_post_hook(_loaded)
        optimizer.register_step_pre_hook(_check_state)
        optimizer.__getstate__ = refuse_copy  # type: ignore[method-assign]
    _TAKEN.setdefault(optimizer, WeakSet()).add(owner)


def leave(owner: SliceOwner) -> None:
    """Its parameters are whole from now on. Gradients and optimizers' states are not: drop and
    refuse them."""
    parts = _parts(owner)
    sliced.forget(parts)
    for p in parts:
        p.grad = None
    for optimizer, owners in _TAKEN.items():
        if owner in owners:
            _LEFT.setdefault(optimizer, WeakIdKeyDictionary()).update(parts)


def _parts(owner: SliceOwner) -> dict[nn.Parameter, tuple[int, int]]:
    """The elements of each parameter that this rank has."""
    units = owner.units
    return {p: x for u in units for p, x in zip(u.parameters, u.cut.parts, strict=True)}


def _left(optimizer: Optimizer) -> dict[nn.Parameter, tuple[int, int]]:
    """The slices that it still has state of, of parameters that are whole by now."""
    return {p: x for p, x in _LEFT.get(optimizer, {}).items() if optimizer.state.get(p)}


_INSTEAD = (
    "Let it, or another one, load the state_dict() that it had within full_parameters() before the "
    "close(), or go on with another one from no state"
)


@torch._disable_dynamo  # type: ignore[attr-defined]
def _check_state(optimizer: Optimizer, *_: object) -> None:
    if _left(optimizer):
        raise UsageError(
            "an optimizer steps a model that close() has left whole, with state of this rank's "
            f"flat slices of it. {_INSTEAD}"
        )


def _owners(optimizer: Optimizer) -> list[SliceOwner | None]:
    return sliced.owners(p for group in optimizer.param_groups for p in group["params"])


def _saved(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    for engine in _owners(optimizer) or [None] * bool(_left(optimizer)):
        if engine is None or engine.closed or not engine.gathers_state:
            raise UsageError(
                "state_dict of a sharded model's optimizer: what it keeps is of this rank's flat "
                "slices. Use ringdp.save and ringdp.load, which take the optimizer, too, or call "
                "it within full_parameters(), on every rank"
            )
        state = state | {"state": gathered(engine.shards, engine.units, optimizer, state["state"])}
    return state


def refuse_copy() -> NoReturn:
    """What copy.deepcopy and pickle call. A copy would have this rank's slices, and no hooks."""
    raise UsageError(
        "an optimizer is copied or pickled that keeps this rank's flat slices. Load its state_dict "
        "into another one: that of a sharded model's within full_parameters(), that of a "
        "ZeroRedundancyOptimizer after consolidate_state_dict()"
    )


def clear(optimizer: Optimizer) -> None:
    """It has no state from now on, of slices neither."""
    optimizer.state.clear()
    _LEFT.pop(optimizer, None)


def _loaded(optimizer: Optimizer) -> None:
    _LEFT.pop(optimizer, None)
    for engine in _owners(optimizer):
        if engine is not None and not engine.closed:
            keep_slices(optimizer, engine.units)


def keep_slices(optimizer: Optimizer, units: Sequence[Slices]) -> None:
    """Replace state of whole parameters, from load_state_dict or a step before shard(), by this
    rank's slices of it. Raises UsageError for state of another shape."""
    for unit in units:
        cut = unit.cut
        for entry, p, shape, (begin, end) in zip(
            unit.plan.entries, unit.parameters, cut.shapes, cut.parts, strict=True
        ):
            state = optimizer.state.get(p, {})
            for name, value in list(state.items()):
                if not isinstance(value, Tensor):
                    continue
                if is_per_element(name, value, shape):
                    state[name] = marked(value.reshape(-1)[begin:end].clone())
                elif not is_slice(optimizer, name, value, end - begin):
                    check_single(optimizer, name, value, entry.name)
            if entry.elements and begin == end:
                optimizer.state.pop(p, None)


def gathered(
    comm: Communicator,
    units: Sequence[Slices],
    optimizer: Optimizer,
    state: dict[Any, Any],
    root: int | None = None,
) -> dict[Any, Any]:
    """`state`, by the parameter's number, with whole tensors in place of slices. With a `root`,
    the other ranks get meta tensors. Collective."""
    places = {id(p): (unit, at) for unit in units for at, p in enumerate(unit.parameters)}
    numbered = [p for group in optimizer.param_groups for p in group["params"]]
    whole, mine, wrong = dict[Any, dict[str, Any]](), list[list[Any]](), ""
    for number, values in state.items():
        if not (place := places.get(id(numbered[number]))):
            whole[number] = dict(values)
            continue
        for name, value in values.items():
            try:
                mine.append([number, name, *_described(optimizer, name, value, *place)])
            except UsageError as e:  # raised on all ranks, of which others may lack this state
                wrong = wrong or str(e)
    views: dict[tuple[int, str, str], list[Tensor]] = {}
    singles: list[list[tuple[Any, str, Tensor]]] = []
    every = gather_json(comm, [mine, wrong])
    for _, wrong in every:
        if wrong:
            raise UsageError(wrong)
    for facts, _ in every:
        singles.append([])
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
                value = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
                singles[-1].append((number, name, value))
            whole[number][name] = value
    for number, name, value in singles[comm.rank]:
        value.copy_(state[number][name])
    share(comm, [[value for *_, value in of_rank] for of_rank in singles])
    return dict(sorted(whole.items()))


def is_per_element(name: str, value: Any, shape: Sequence[int]) -> bool:
    """Whether state has one value for each element of what has that shape."""
    return isinstance(value, Tensor) and name != "step" and (*value.shape,) == (*shape,)


def is_slice(optimizer: Optimizer, name: str, value: Any, elements: int) -> bool:
    """Whether state has one value for each of this rank's elements of a parameter. Where whole
    parameters are stepped only what is marked has: with a weight of [d, 1], whose slice is [d], go
    Adafactor's sums of rows, [d], too."""
    if needs_whole(optimizer):
        return hasattr(value, _SLICE)
    return is_per_element(name, value, (elements,))


def marked(value: Tensor) -> Tensor:
    """The same, marked as a slice of state."""
    setattr(value, _SLICE, True)
    return value


def check_single(optimizer: Optimizer, name: str, value: Tensor, parameter: str) -> None:
    """Raise UsageError for state that is not one value, unless whole parameters are stepped."""
    if value.numel() > 1 and not needs_whole(optimizer):
        raise UsageError(
            f"the {type(optimizer).__name__}'s state {name!r} of parameter {parameter} has shape "
            f"{list(value.shape)}; allowed where slices are stepped: one value for each element, "
            "or one for all. If the optimizer looks at whole parameters, set its attribute "
            "needs_whole_parameters to True"
        )


def is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def check_json(optimizer: Optimizer, name: str, value: Any, parameter: str) -> None:
    """Raise UsageError for state that is no tensor, and that no JSON holds."""
    if not is_json(value):
        raise UsageError(
            f"the {type(optimizer).__name__}'s state {name!r} of parameter {parameter} is a "
            f"{type(value).__name__} that is not JSON; allowed in what is saved: tensors, and JSON"
        )


def _described(
    optimizer: Optimizer, name: str, value: Any, unit: Slices, at: int
) -> tuple[str | None, list[int] | None, Any]:
    """(dtype, shape, value) as JSON. A tensor has no value, and for each element no shape."""
    if not isinstance(value, Tensor):
        check_json(optimizer, name, value, unit.plan.entries[at].name)
        return None, None, value
    dtype = str(value.dtype).removeprefix("torch.")
    begin, end = unit.cut.spans[at]
    if is_slice(optimizer, name, value, end - begin):
        return dtype, None, None
    check_single(optimizer, name, value, unit.plan.entries[at].name)
    return dtype, list(value.shape), None


def _gather(
    comm: Communicator,
    unit: Slices,
    optimizer: Optimizer,
    name: str,
    dtype: torch.dtype,
    root: int | None,
) -> list[Tensor]:
    """State `name` of the unit's parameters, in their shapes; zeros where a rank has none."""
    own = torch.zeros(unit.plan.shard, dtype=dtype, device=unit.parameters[0].device)
    for p, (begin, end) in zip(unit.parameters, unit.cut.spans, strict=True):
        value = optimizer.state.get(p, {}).get(name)
        if is_slice(optimizer, name, value, end - begin):
            own[begin:end] = value
    here = root in (None, comm.rank)
    full = own.new_empty(unit.plan.padded, device=own.device if here else "meta")
    if root is None:
        comm.all_gather(full, own, tag=unit.index)
    else:
        comm.gather(full, own, root, tag=unit.index)
    return unit.cut.whole(full)
