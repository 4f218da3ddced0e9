"""Plans what a rank reads of a checkpoint, and where it goes, without changing anything.

A load plans first, so that it changes all or nothing. A save plans before it commits, so that no
checkpoint is replaced by one that the same ranks could not load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringdp.errors import CheckpointError
from ringdp.parallel import nested
from ringdp.parallel.checkpoint import extra
from ringdp.parallel.checkpoint.index import Index, parts_of
from ringdp.parallel.checkpoint.spans import Piece, groups_of, persistent_buffers, stepped
from ringdp.parallel.checkpoint.tensorfile import dtype_of
from ringdp.parallel.engine import Engine
from ringdp.parallel.optimizer.kinds import needs_whole
from ringdp.parallel.replicas import write


class Read(NamedTuple):
    """Elements begin..end of a tensor, and what to do with them."""

    key: str
    begin: int
    end: int
    put: Callable[[Tensor], object]


class Kept(NamedTuple):
    """An optimizer's state of a parameter, flat (see `nested`); the reads fill in its tensors."""

    optimizer: torch.optim.Optimizer
    piece: Piece
    state: dict[str, Any]


class Plan(NamedTuple):
    reads: list[Read]
    kept: list[Kept]
    states: dict[str, Tensor]  # tensors of modules' extra state, which the reads fill in


def planned(
    index: Index,
    engine: Engine,
    optimizers: Sequence[torch.optim.Optimizer],
    found: list[Piece],
) -> Plan:
    """Raises CheckpointError if the checkpoint is of another model or optimizer."""
    buffers = persistent_buffers(engine.model)
    _check(index, found, buffers, extra.modules(engine.model))
    plan = Plan([], [], {})
    for piece in found:
        key = f"parameter/{piece.name}"
        plan.reads.append(Read(key, *piece.kept, partial(_copy, piece.rest)))
    for name, buffer in buffers.items():
        plan.reads.append(Read(f"buffer/{name}", 0, buffer.numel(), partial(_copy, buffer)))
    keys: list[str] = []
    for packed in index.modules.values():
        extra.unpack(packed, keys.append)
    for key in keys:
        if (entry := index.tensors.get(key)) is None:
            raise CheckpointError(f"the checkpoint lacks {key}")
        put = partial(_put, plan.states, key, entry.shape, None, None)
        plan.reads.append(Read(key, 0, math.prod(entry.shape), put))
    if optimizers:
        _check_groups(index, names_of(optimizers), groups_of(optimizers, found))
        mine = {
            piece.name: Kept(one, piece, {})
            for one, piece in stepped(engine, optimizers, found)
            if piece.kept[0] < piece.kept[1] or 0 in piece.shape
        }
        plan.reads.extend(_state(index, mine))
        plan.kept.extend(mine.values())
        for name, kept in mine.items():
            try:
                nested.deep(kept.state)
            except ValueError as e:
                raise CheckpointError(f"the optimizer's state of {name} is not sound: {e}") from e
    return plan


def names_of(optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    """Their classes."""
    return ", ".join(type(optimizer).__name__ for optimizer in optimizers) or None


def _check(
    index: Index, found: list[Piece], buffers: dict[str, Tensor], modules: Iterable[str]
) -> None:
    here = {f"parameter/{p.name}": (p.shape, p.rest.dtype) for p in found}
    here |= {f"buffer/{name}": (list(b.shape), b.dtype) for name, b in buffers.items()}
    there = {k: e for k, e in index.tensors.items() if k.startswith(("parameter/", "buffer/"))}
    problems = [f"lacks {k}" for k in here if k not in there]
    problems += [f"has {k}, which the model has not" for k in there if k not in here]
    problems += [f"has other extra state: of {m}" for m in index.modules.keys() ^ set(modules)]
    for key in here.keys() & there.keys():
        (shape, dtype), entry = here[key], there[key]
        if shape != entry.shape:
            problems.append(f"has {key} of shape {entry.shape}, not {shape}")
        if not _takes(dtype, dtype_of(entry.dtype)):
            problems.append(f"has {key} as {entry.dtype}, which is no {dtype}")
    if problems:
        raise CheckpointError(f"the checkpoint is of another model: it {', '.join(problems[:8])}")


def _takes(here: torch.dtype, there: torch.dtype) -> bool:
    """Whether a cast loses at most a float's precision."""
    if here == there:
        return True
    kinds = {(d.is_floating_point, d.is_complex, d == torch.bool) for d in (here, there)}
    if kinds != {(False, False, False)}:
        return len(kinds) == 1
    room, values = torch.iinfo(here), torch.iinfo(there)
    return room.min <= values.min and values.max <= room.max


def _check_groups(index: Index, optimizer: str | None, groups: list[dict[str, Any]]) -> None:
    if index.groups is None:
        raise CheckpointError("the checkpoint was saved without an optimizer")
    if index.optimizer != optimizer:  # ringdp.AdamW and torch's keep the same
        raise CheckpointError(f"the checkpoint's optimizer is {index.optimizer}, not {optimizer}")
    here, there = ([set(g["names"]) for g in gs] for gs in (groups, index.groups))
    if here != there:
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(there)} parameter groups with "
            f"{[len(g) for g in there]} parameters, this one {len(here)} with "
            f"{[len(g) for g in here]}, or others in them"
        )
    for number, (group, saved) in enumerate(zip(groups, index.groups, strict=True)):
        for option, value in saved["options"].items():
            own = group["options"].get(option)
            if option == "caution" and bool(own) != bool(value):  # needs_whole would change
                raise CheckpointError(
                    f"the checkpoint has caution = {value} for parameter group {number}, and the "
                    f"optimizer here {own}: set it alike before the load"
                )
            if not _fits(own, value):
                raise CheckpointError(
                    f"the checkpoint has {option} = {value!r} for parameter group {number}, and "
                    f"the optimizer here {own!r}, which is of another kind"
                )


def _fits(here: Any, there: Any) -> bool:
    """Whether an option may take that value: a number a number, a list one of the same length."""
    if here is None or isinstance(here, bool):  # None often stands for what torch finds best
        return here is None or there is None or isinstance(there, bool)
    if isinstance(here, list | tuple):
        alike = isinstance(there, list | tuple) and len(there) == len(here)
        return alike and all(map(_fits, here, there))
    if isinstance(here, int | float):
        return isinstance(there, int | float)
    return isinstance(there, type(here))


def _copy(to: Tensor, values: Tensor) -> None:
    write(to, values.view(to.shape))


def _state(index: Index, mine: Mapping[str, Kept]) -> Iterator[Read]:
    """Reads of optimizer state of these parameters, by name. What is no tensor is put in its place
    at once; if the parts differ, the first one's."""
    on_device = {  # where `step` is, too; torch's default is the host
        name
        for group in index.groups or []
        if group["options"].get("capturable") or group["options"].get("fused")
        for name in group["names"]
    }
    for key, name, (_, piece, state) in _of_state(index.scalars, mine):
        for begin, end, value in index.scalars[key]:
            if (begin < piece.kept[1] and piece.kept[0] < end) or begin == end:
                state[name] = value
                break
    for key, name, (optimizer, piece, state) in _of_state(index.tensors, mine):
        entry, (begin, end) = index.tensors[key], piece.kept
        if not (parts := entry.within(begin, end)):
            continue  # the rank that saved them had no state
        shape: Sequence[int] = piece.rest.shape
        dtype = None
        if entry.single is not None:
            if math.prod(entry.single) > 1 and not needs_whole(optimizer):
                raise CheckpointError(
                    f"{key} has the shape {entry.single}, as an optimizer keeps it that looks at "
                    "whole parameters: set this one's attribute needs_whole_parameters to True"
                )
            begin, shape = max(begin, parts[0].begin), entry.single
            end = begin + 1
        elif (there := sum(min(p.end, end) - max(p.begin, begin) for p in parts)) != end - begin:
            raise CheckpointError(
                f"of {key}, elements {begin}..{end}, there are only {there}: a rank that saved had "
                f"no {name!r}; what ranks have unlike each other, as many ({index.ranks}) can load "
                f"in a stage from 1 up"
            )
        elif entry.dtype == index.tensors[f"parameter/{piece.name}"].dtype:
            dtype = piece.rest.dtype
        device = piece.rest.device if name != "step" or piece.name in on_device else None
        state[name] = torch.empty(0, device="meta")  # until it is read
        yield Read(key, begin, end, partial(_put, state, name, shape, device, dtype))


@torch.inference_mode(False)  # not even a view made in it can be written to in training
def _put(
    state: dict[str, Any],
    name: str,
    shape: Sequence[int],
    device: torch.device | None,
    dtype: torch.dtype | None,
    values: Tensor,
) -> None:
    state[name] = values.view(shape).to(device, dtype)


def _of_state(keys: Iterable[str], mine: Mapping[str, Kept]) -> Iterator[tuple[str, str, Kept]]:
    """(key, name, the parameter's) of the optimizer state that this rank keeps."""
    for key in keys:
        kind, name, parameter = parts_of(key)
        if kind == "optimizer" and parameter in mine:
            yield key, name, mine[parameter]
