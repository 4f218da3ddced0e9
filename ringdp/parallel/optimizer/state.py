"""The state_dict of an optimizer that steps slices: of whole parameters, as in one process.

State with one value for each element (Adam's exp_avg) is gathered unit by unit. Of state with one
value for the whole slice (Adam's step) the first rank that has one counts. load_state_dict takes
whole state, of which each rank keeps its slices. Where whole parameters are stepped, it keeps that
of the parameters that it owns, whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from ringdp.comm import Communicator
from ringdp.errors import UsageError
from ringdp.parallel import nested
from ringdp.parallel.cut import SliceOwner, Slices
from ringdp.parallel.guards import sliced
from ringdp.parallel.optimizer.kinds import needs_whole
from ringdp.parallel.optimizer.owners import drop, may_have_state, places
from ringdp.parallel.replicas import broadcast, gather_json

_TAKEN = WeakKeyDictionary[Optimizer, WeakSet[SliceOwner]]()  # whose slices each steps
_WHOLE = WeakKeyDictionary[Optimizer, bool]()  # whether its state is of whole parameters
# These keep state of slices, where parameters are whole by now: a WeakIdKeyDictionary of `_parts`.
_LEFT = WeakKeyDictionary[Optimizer, Any]()


def take(optimizer: Optimizer, owner: SliceOwner) -> None:
    """It steps slices of `owner`: from now on its state_dict is of whole parameters. State that it
    has of whole parameters is sliced; raises UsageError for state that cannot be, for state of
    other slices, and if it looks at whole parameters now and did not before, or the reverse."""
    _check_looks(optimizer)
    if owner in _TAKEN.get(optimizer, ()):
        return
    parts = _parts(owner)
    if any(parts.get(p, part) != part for p, part in _left(optimizer).items()):
        raise UsageError(f"an optimizer has state of the slices before a close(). {_INSTEAD}")
    keep_slices(optimizer, owner.units, owner.shards.rank)
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


def _parts(owner: SliceOwner) -> dict[nn.Parameter, Any]:
    """The elements of each parameter that each rank has, as all ranks know them."""
    return {
        p: unit.plan.parts(entry)
        for unit in owner.units
        for p, entry in zip(unit.parameters, unit.plan.entries, strict=True)
    }


def _left(optimizer: Optimizer) -> dict[nn.Parameter, Any]:
    """The parts of which it still has state, of parameters that are whole by now. Where it looks at
    whole parameters, other ranks may have the state."""
    left = _LEFT.get(optimizer, {})
    held: Any = optimizer.state
    if may_have_state(optimizer):
        held = {p: True for group in optimizer.param_groups for p in group["params"]}
    return {p: x for p, x in left.items() if held.get(p)}


def _check_looks(optimizer: Optimizer) -> None:
    """Raise UsageError if it looks at whole parameters now and did not before, or the reverse."""
    whole = needs_whole(optimizer)
    if _WHOLE.setdefault(optimizer, whole) != whole:
        now, before = ("whole parameters", "slices")[:: 1 if whole else -1]
        raise UsageError(
            f"the {type(optimizer).__name__} looks at {now} now, and has state for {before}: its "
            "caution or needs_whole_parameters has changed. Change it back, take the state_dict() "
            "within full_parameters(), change it again, and let it load that"
        )


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
        _check_looks(optimizer)
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
    _WHOLE.pop(optimizer, None)


def _loaded(optimizer: Optimizer) -> None:
    _LEFT.pop(optimizer, None)
    _WHOLE.pop(optimizer, None)
    for engine in _owners(optimizer):
        if engine is not None and not engine.closed:
            keep_slices(optimizer, engine.units, engine.shards.rank)


def keep_slices(optimizer: Optimizer, units: Sequence[Slices], rank: int) -> None:
    """Replace state of whole parameters, from load_state_dict or a step before shard(), by this
    rank's slices of it, or drop what others own. Raises UsageError for state of another shape."""
    if needs_whole(optimizer):
        if may_have_state(optimizer) or any(optimizer.state.values()):
            found = places(optimizer, units, rank)
            drop(optimizer, [place.parameter for place in found if place.owner != rank])
        return
    for unit in units:
        cut = unit.cut
        for entry, p, shape, (begin, end) in zip(
            unit.plan.entries, unit.parameters, cut.shapes, cut.parts, strict=True
        ):
            state = optimizer.state.get(p, {})
            for name, value in list(state.items()):
                slices = partial(_sliced, optimizer, name, shape, (begin, end), entry.name)
                state[name] = tree_map_only(Tensor, slices, value)
            if entry.elements and begin == end:
                optimizer.state.pop(p, None)


def _sliced(
    optimizer: Optimizer,
    name: str,
    shape: torch.Size,
    part: tuple[int, int],
    parameter: str,
    value: Tensor,
) -> Tensor:
    if is_per_element(name, value, shape):
        return value.reshape(-1)[slice(*part)].clone()
    if not is_per_element(name, value, (part[1] - part[0],)):
        check_single(optimizer, name, value, parameter)
    return value


def gathered(
    comm: Communicator,
    units: Sequence[Slices],
    optimizer: Optimizer,
    state: dict[Any, Any],
    root: int | None = None,
) -> dict[Any, Any]:
    """`state`, by the parameter's number, with whole tensors in place of slices, of all ranks. With
    a `root`, the other ranks get meta tensors. Collective."""
    where = {id(p): (unit, at) for unit in units for at, p in enumerate(unit.parameters)}
    numbered = [p for group in optimizer.param_groups for p in group["params"]]
    whole, own, mine, wrong = dict[Any, Any](), dict[int, dict[str, Any]](), list[list[Any]](), ""
    for number, values in state.items():
        p = numbered[number]
        if not (place := where.get(id(p))):
            whole[number] = dict(values)
            continue
        unit, at = place
        try:
            own[id(p)] = flat = flattened(optimizer, values, unit.plan.entries[at].name)
            for name, value in flat.items():
                mine.append([number, name, *_described(optimizer, name, value, unit, at)])
        except UsageError as e:  # raised on all ranks, of which others may lack this state
            wrong = wrong or str(e)
    every = gather_json(comm, [mine, wrong])
    for _, wrong in every:
        if wrong:
            raise UsageError(wrong)
    found: dict[Any, dict[str, Any]] = {}
    views: dict[tuple[int, str, str], list[Tensor]] = {}
    for rank, (facts, _) in enumerate(every):
        singles: list[tuple[dict[str, Any], str]] = []
        for number, name, dtype, shape, device, value in facts:
            p, of = numbered[number], found.setdefault(number, {})
            if name in of:
                continue
            if shape is not None:
                value = torch.empty(
                    shape,
                    dtype=getattr(torch, dtype),
                    device=device if device == "cpu" else p.device,
                )
                if rank == comm.rank:
                    value.copy_(own[id(p)][name])
                singles.append((of, name))
            elif dtype is not None:
                unit, at = where[id(p)]
                key = unit.index, name, dtype
                if key not in views:
                    views[key] = _gather(comm, unit, own, name, getattr(torch, dtype), root)
                value = views[key][at]
            of[name] = value
        for on_host in (True, False):  # what is sent together is on one device
            broadcast(comm, [of[n] for of, n in singles if of[n].is_cpu == on_host], rank)
        if root not in (None, comm.rank):
            for of, name in singles:
                of[name] = of[name].to("meta")
    whole |= {number: nested.deep(of) for number, of in found.items()}
    return dict(sorted(whole.items()))


def is_per_element(name: str, value: Any, shape: Sequence[int]) -> bool:
    """Whether state has one value for each element of what has that shape."""
    return isinstance(value, Tensor) and name != "step" and (*value.shape,) == (*shape,)


def check_single(optimizer: Optimizer, name: str, value: Tensor, parameter: str) -> None:
    """Raise UsageError for state that is not one value, unless whole parameters are stepped."""
    if value.numel() > 1 and not needs_whole(optimizer):
        raise UsageError(
            f"the {type(optimizer).__name__}'s state {name!r} of parameter {parameter} has shape "
            f"{list(value.shape)}; allowed where slices are stepped: one value for each element, "
            "or one for all. If the optimizer looks at whole parameters, set its attribute "
            "needs_whole_parameters to True"
        )


def flattened(optimizer: Optimizer, state: dict[str, Any], parameter: str) -> dict[str, Any]:
    """`nested.flat` of its state of a parameter. Raises UsageError for what cannot be saved."""
    try:
        return nested.flat(state)
    except TypeError as e:
        raise UsageError(
            f"the {type(optimizer).__name__}'s state of parameter {parameter} cannot be saved: "
            f"{e}; allowed: {nested.ALLOWED}"
        ) from e


def _described(
    optimizer: Optimizer, name: str, value: Any, unit: Slices, at: int
) -> tuple[str | None, list[int] | None, str | None, Any]:
    """(dtype, shape, device, value) as JSON. A tensor has no value, and for each element no
    shape."""
    if not isinstance(value, Tensor):
        return None, None, None, value
    dtype = str(value.dtype).removeprefix("torch.")
    begin, end = unit.cut.spans[at]
    if not needs_whole(optimizer) and is_per_element(name, value, (end - begin,)):
        return dtype, None, None, None
    check_single(optimizer, name, value, unit.plan.entries[at].name)
    return dtype, list(value.shape), value.device.type, None


def _gather(
    comm: Communicator,
    unit: Slices,
    states: dict[int, dict[str, Any]],
    name: str,
    dtype: torch.dtype,
    root: int | None,
) -> list[Tensor]:
    """State `name` of the unit's parameters, in their shapes; zeros where a rank has none.
    `states`: this rank's, by the parameter's id."""
    own = torch.zeros(unit.plan.shard, dtype=dtype, device=unit.parameters[0].device)
    for p, (begin, end) in zip(unit.parameters, unit.cut.spans, strict=True):
        value: Any = states.get(id(p), {}).get(name)
        if is_per_element(name, value, (end - begin,)):
            own[begin:end] = value
    here = root in (None, comm.rank)
    full = own.new_empty(unit.plan.padded, device=own.device if here else "meta")
    if root is None:
        comm.all_gather(full, own, tag=unit.index)
    else:
        comm.gather(full, own, root, tag=unit.index)
    return unit.cut.whole(full)
