"""Load: every rank reads the elements that it keeps, whoever wrote them.

All that is to be read is listed and checked first, on every rank: dtypes, sizes and that the files
have all their bytes. Only then is anything changed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringdp.errors import CheckpointError
from ringdp.parallel.checkpoint import extra
from ringdp.parallel.checkpoint.index import Index, Part, file_of, read_index
from ringdp.parallel.checkpoint.save import persistent_buffers
from ringdp.parallel.checkpoint.spans import Piece, groups_of, pieces
from ringdp.parallel.checkpoint.tensorfile import TensorFile, dtype_of
from ringdp.parallel.checkpoint.together import together
from ringdp.parallel.engine import Engine
from ringdp.parallel.replicas import write


class _Read(NamedTuple):
    """Elements begin..end of a tensor, and what is done with them."""

    key: str
    begin: int
    end: int
    put: Callable[[Tensor], object]


def load(
    path: str | os.PathLike[str],
    engine: Engine,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Set parameters, buffers, modules' extra state, the optimizer's state and its options to what
    `save` wrote.

    Any number of ranks, stage, units and precision will do; values are cast to the dtypes here.
    Collective. Returns the checkpoint's `extra`. Raises CheckpointError, on every rank and with
    nothing changed, if it is of another model or optimizer, or any rank cannot read its part.
    """
    path, found = Path(path), pieces(engine)
    with together(engine.comm, "nothing was loaded"):
        index, buffers = read_index(path), persistent_buffers(engine.model)
        modules = extra.modules(engine.model)
        _check(index, found, buffers, modules)
        reads = list(_values(found, buffers))
        states: dict[str, Tensor] = {}
        reads += _states(index, states)
        if optimizer is not None:
            _check_groups(index, groups_of(optimizer, found))
            reads += _state(index, optimizer, found)
        reader = _Reader(path, index)
        for read in reads:
            reader.check(read)
    if optimizer is not None:
        _set_options(optimizer, index)
        optimizer.state.clear()
        for key, name, piece in _of_state(index.scalars, found):
            optimizer.state[piece.parameter][name] = index.scalars[key]
    with torch.no_grad():
        for read in reads:
            read.put(reader.read(read))
    for name, module in modules.items():
        module.set_extra_state(extra.unpack(index.modules[name], states.__getitem__))
    engine.comm.barrier()
    return index.extra


class _Reader:
    """Elements of a tensor, from the files that have them."""

    def __init__(self, path: Path, index: Index) -> None:
        self._index, self._directory = index, path / index.directory
        self._files: dict[int, TensorFile] = {}

    def check(self, read: _Read) -> None:
        """Raises CheckpointError unless all files have what the index says of it."""
        dtype = dtype_of(self._index.tensors[read.key].dtype)
        for part, _, _ in self._parts(read):
            file, said = self._file(part.rank), (dtype, part.end - part.begin)
            if (found := file.dtype_and_elements(read.key)) != said:
                raise CheckpointError(f"{file.path} has {found} of {read.key}, not {said}")

    def read(self, read: _Read) -> Tensor:
        values = [self._file(p.rank).read(read.key, *span) for p, *span in self._parts(read)]
        if not values:
            return torch.empty(0, dtype=dtype_of(self._index.tensors[read.key].dtype))
        return torch.cat(values) if len(values) > 1 else values[0]

    def _parts(self, read: _Read) -> Iterator[tuple[Part, int, int]]:
        """The parts with any of them, and which of a part's own elements these are."""
        for part in sorted(self._index.tensors[read.key].parts, key=lambda part: part.begin):
            low, high = max(part.begin, read.begin), min(part.end, read.end)
            if low < high:
                yield part, low - part.begin, high - part.begin

    def _file(self, rank: int) -> TensorFile:
        if rank not in self._files:
            self._files[rank] = TensorFile(file_of(self._directory, rank))
        return self._files[rank]


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
        if _kind(dtype) != _kind(dtype_of(entry.dtype)):
            problems.append(f"has {key} as {entry.dtype}, which is no {dtype}")
    if problems:
        raise CheckpointError(f"the checkpoint is of another model: it {', '.join(problems[:8])}")


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    """What no cast should change."""
    return dtype.is_floating_point, dtype.is_complex


def _check_groups(index: Index, groups: list[dict[str, Any]]) -> None:
    if index.groups is None:
        raise CheckpointError("the checkpoint was saved without an optimizer")
    here, there = ([set(g["names"]) for g in gs] for gs in (groups, index.groups))
    if here != there:
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(there)} parameter groups with "
            f"{[len(g) for g in there]} parameters, this one {len(here)} with "
            f"{[len(g) for g in here]}, or others in them"
        )


def _set_options(optimizer: torch.optim.Optimizer, index: Index) -> None:
    for group, saved in zip(optimizer.param_groups, index.groups or [], strict=True):
        for option, given in saved["options"].items():
            if isinstance(group.get(option), Tensor):
                group[option].fill_(given)
            else:
                group[option] = tuple(given) if isinstance(given, list) else given


def _values(found: list[Piece], buffers: dict[str, Tensor]) -> Iterator[_Read]:
    """Reads of parameters and buffers."""
    for piece in found:
        yield _Read(f"parameter/{piece.name}", *piece.kept, partial(_copy, piece.rest))
    for name, buffer in buffers.items():
        yield _Read(f"buffer/{name}", 0, buffer.numel(), partial(_copy, buffer))


def _states(index: Index, states: dict[str, Tensor]) -> Iterator[_Read]:
    """Reads of the tensors in modules' extra state, to be in `states`."""
    keys: list[str] = []
    for packed in index.modules.values():
        extra.unpack(packed, keys.append)
    for key in keys:
        if (entry := index.tensors.get(key)) is None:
            raise CheckpointError(f"the checkpoint lacks {key}")
        yield _Read(key, 0, math.prod(entry.shape), partial(_keep, states, key, entry.shape))


def _keep(states: dict[str, Tensor], key: str, shape: list[int], values: Tensor) -> None:
    states[key] = values.view(shape)


def _copy(to: Tensor, values: Tensor) -> None:
    write(to, values.view(to.shape))


def _state(index: Index, optimizer: torch.optim.Optimizer, found: list[Piece]) -> Iterator[_Read]:
    """Reads of what an optimizer keeps for the parameters of which this rank has a part."""
    for key, name, piece in _of_state(index.tensors, found):
        whole = index.tensors[key].shape == [] and (piece.shape != [] or name == "step")
        span, shape = ((0, 1), torch.Size()) if whole else (piece.kept, piece.rest.shape)
        device = None if whole else piece.rest.device
        as_parameter = index.tensors[key].dtype == index.tensors[f"parameter/{piece.name}"].dtype
        dtype = piece.rest.dtype if as_parameter and not whole else None

        def put(
            values: Tensor,
            name: str = name,
            piece: Piece = piece,
            shape: torch.Size = shape,
            device: torch.device | None = device,
            dtype: torch.dtype | None = dtype,
        ) -> None:
            optimizer.state[piece.parameter][name] = values.view(shape).to(device, dtype)

        yield _Read(key, *span, put)


def _of_state(keys: Iterable[str], found: list[Piece]) -> Iterator[tuple[str, str, Piece]]:
    """Key, name and parameter of those that are of this rank's part of an optimizer's state."""
    mine = {piece.name: piece for piece in found if piece.kept[0] != piece.kept[1]}
    for key in keys:
        kind, _, rest = key.partition("/")
        name, _, parameter = rest.partition("/")
        if kind == "optimizer" and parameter in mine:
            yield key, name, mine[parameter]
