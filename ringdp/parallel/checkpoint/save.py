"""Save: every rank writes what it owns, then rank 0 commits. `index` says what a crash leaves."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringdp.errors import CheckpointError
from ringdp.parallel.checkpoint import tensorfile
from ringdp.parallel.checkpoint.extra import pack
from ringdp.parallel.checkpoint.index import (
    Entry,
    Index,
    Part,
    clean,
    commit,
    file_of,
    new_directory,
)
from ringdp.parallel.checkpoint.spans import Piece, groups_of, is_whole, pieces
from ringdp.parallel.checkpoint.together import together
from ringdp.parallel.engine import Engine
from ringdp.parallel.replicas import gather_json


def save(
    path: str | os.PathLike[str],
    engine: Engine,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write parameters, buffers, the optimizer's state and `extra` (JSON) to directory `path`; also
    what modules give by get_extra_state, where that is JSON and tensors.

    Collective. Until it is complete, and if a rank dies at any moment, `path` holds what it held
    before. It must be on a disk that all ranks see. Raises CheckpointError on every rank if any of
    them cannot write, or has something that a checkpoint cannot hold.
    """
    path, comm = Path(path), engine.comm
    found = pieces(engine)
    name = gather_json(comm, new_directory())[0]
    directory = path / name
    try:
        with together(comm, "the checkpoint was not written"):
            groups = groups_of(optimizer, found) if optimizer else None
            modules, states = pack(engine.model)
            tensors, shapes, scalars = _own(engine, optimizer, found, states)
            _check_json([groups, extra, scalars])
            directory.mkdir(parents=True, exist_ok=True)
            tensorfile.write(
                file_of(directory, comm.rank),
                {key: tensor for key, (tensor, _) in tensors.items()},
                {key: [begin] for key, (_, begin) in tensors.items()},
            )
    except CheckpointError:
        if comm.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)  # the disk may be full
        raise
    facts = {
        key: [str(t.dtype).removeprefix("torch."), shapes[key], begin, begin + t.numel()]
        for key, (t, begin) in tensors.items()
    }
    index = Index(name, comm.size, engine.stage.number, {}, {}, groups, extra or {}, modules)
    for rank, (theirs, values) in enumerate(gather_json(comm, [facts, scalars])):
        index.scalars |= values
        for key, (dtype, shape, begin, end) in theirs.items():
            entry = index.tensors.setdefault(key, Entry(dtype, shape))
            entry.parts.append(Part(rank, begin, end))
    with together(comm, "the checkpoint was not written"):
        if comm.rank == 0:
            commit(path, index)
    with together(comm, "the checkpoint is written, but what it replaces could not be removed"):
        if comm.rank == 0:
            clean(path, index)


def _check_json(values: Any) -> None:
    try:
        json.dumps(values)
    except (TypeError, ValueError) as e:
        raise CheckpointError(f"extra, or the optimizer's, is not JSON: {e}") from e


def _own(
    engine: Engine,
    optimizer: torch.optim.Optimizer | None,
    found: list[Piece],
    states: dict[str, Tensor],
) -> tuple[dict[str, tuple[Tensor, int]], dict[str, list[int]], dict[str, Any]]:
    """What this rank writes: tensors with their first element's place, whole shapes, scalars."""
    tensors: dict[str, tuple[Tensor, int]] = {}
    shapes: dict[str, list[int]] = {}
    scalars: dict[str, Any] = {}
    for piece in found:
        begin, end = piece.writes
        total = torch.Size(piece.shape).numel()
        if begin == end and not (total == 0 and engine.comm.rank == 0):
            continue
        key = f"parameter/{piece.name}"
        tensors[key], shapes[key] = (piece.own(piece.rest), begin), piece.shape
        state = optimizer.state.get(piece.parameter, {}) if optimizer else {}
        for name, value in state.items():
            key = f"optimizer/{name}/{piece.name}"
            if isinstance(value, Tensor) and not is_whole(name, value, piece.parameter):
                tensors[key], shapes[key] = (piece.own(value), begin), piece.shape
            elif begin == 0 and isinstance(value, Tensor):
                tensors[key], shapes[key] = (value.detach().reshape(-1), 0), []
            elif begin == 0:
                scalars[key] = value
    if engine.comm.rank == 0:
        buffers = persistent_buffers(engine.model)
        for key, value in ({f"buffer/{name}": b for name, b in buffers.items()} | states).items():
            tensors[key], shapes[key] = (value.detach().reshape(-1), 0), list(value.shape)
    return tensors, shapes, scalars


def persistent_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """Those of its state_dict."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
