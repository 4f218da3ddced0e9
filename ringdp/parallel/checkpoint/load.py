"""Load: every rank reads the elements that it keeps, whoever wrote them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringdp.errors import CheckpointError
from ringdp.parallel.checkpoint.index import Entry, Index, file_of, read_index
from ringdp.parallel.checkpoint.save import persistent_buffers
from ringdp.parallel.checkpoint.spans import Piece, groups_of, pieces
from ringdp.parallel.checkpoint.tensorfile import TensorFile
from ringdp.parallel.engine import Engine


def load(
    path: str | os.PathLike[str],
    engine: Engine,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Set parameters, buffers and the optimizer's state and options to what `save` wrote.

    Any number of ranks, stage, units and precision will do; every rank calls it. Returns the
    checkpoint's `extra`. Raises CheckpointError if it is of another model or optimizer, which is
    found before anything is changed, or cannot be read.
    """
    path = Path(path)
    index, found = read_index(path), pieces(engine)
    buffers = persistent_buffers(engine.model)
    _check(index, found, buffers)
    if optimizer is not None:
        _check_groups(index, groups_of(optimizer, found))
    reader = _Reader(path, index)
    try:
        with torch.no_grad():
            for piece in found:
                values = reader.read(f"parameter/{piece.name}", *piece.kept)
                piece.rest.copy_(values.view(piece.rest.shape))
            for name, buffer in buffers.items():
                buffer.copy_(reader.read(f"buffer/{name}", 0, buffer.numel()).view(buffer.shape))
            if optimizer is not None:
                _load_state(reader, index, optimizer, found)
    finally:
        reader.close()
    engine.comm.barrier()
    return index.extra


class _Reader:
    """Elements of a tensor, from the files that have them."""

    def __init__(self, path: Path, index: Index) -> None:
        self._index, self._directory = index, path / index.directory
        self._files: dict[int, TensorFile] = {}

    def read(self, key: str, begin: int, end: int) -> Tensor:
        entry = self._index.tensors[key]
        parts = [torch.empty(0)]
        at = begin
        for rank, first, last in sorted(entry.parts, key=lambda part: part.begin):
            low, high = max(first, begin), min(last, end)
            if low < high:
                if low != at:
                    break
                parts.append(self._file(rank).read(key, low - first, high - first))
                at = high
        if at != end:
            raise CheckpointError(f"{self._directory} lacks elements {at}..{end} of {key}")
        return torch.cat(parts[1:]) if len(parts) > 1 else parts[0]

    def _file(self, rank: int) -> TensorFile:
        if rank not in self._files:
            self._files[rank] = TensorFile(file_of(self._directory, rank))
        return self._files[rank]

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _check(index: Index, found: list[Piece], buffers: dict[str, Tensor]) -> None:
    here = {f"parameter/{p.name}": p.shape for p in found}
    here |= {f"buffer/{name}": list(b.shape) for name, b in buffers.items()}
    there = {k: e.shape for k, e in index.tensors.items() if not k.startswith("optimizer/")}
    problems = [f"lacks {k}" for k in here if k not in there]
    problems += [f"has {k}, which the model has not" for k in there if k not in here]
    problems += [
        f"has {k} of shape {there[k]}, not {here[k]}"
        for k in here
        if k in there and there[k] != here[k]
    ]
    if problems:
        raise CheckpointError(f"the checkpoint is of another model: it {', '.join(problems[:8])}")


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


def _load_state(
    reader: _Reader, index: Index, optimizer: torch.optim.Optimizer, found: list[Piece]
) -> None:
    for group, saved in zip(optimizer.param_groups, index.groups or [], strict=True):
        for option, given in saved["options"].items():
            if isinstance(group.get(option), Tensor):
                group[option].fill_(given)
            else:
                group[option] = tuple(given) if isinstance(given, list) else given
    states: dict[str, dict[str, Entry | None]] = {}
    for key in (*index.tensors, *index.scalars):
        if key.startswith("optimizer/"):
            _, name, parameter = key.split("/", 2)
            states.setdefault(parameter, {})[name] = index.tensors.get(key)
    optimizer.state.clear()
    for piece in found:
        if piece.kept[0] == piece.kept[1]:
            continue
        for name, entry in states.get(piece.name, {}).items():
            key = f"optimizer/{name}/{piece.name}"
            if entry is None:
                value: Any = index.scalars[key]
            elif entry.shape == [] and (piece.shape != [] or name == "step"):
                value = reader.read(key, 0, 1).view(())
            else:
                value = reader.read(key, *piece.kept).view(piece.rest.shape)
                value = value.to(piece.rest.device)
            optimizer.state[piece.parameter][name] = value
