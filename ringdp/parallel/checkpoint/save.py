"""Save: every rank writes what it owns, then rank 0 commits. `index` says what a crash leaves."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringdp.errors import CheckpointError
from ringdp.parallel.checkpoint import tensorfile
from ringdp.parallel.checkpoint.index import Entry, Index, Part, commit, file_of
from ringdp.parallel.checkpoint.spans import Piece, groups_of, is_whole, pieces
from ringdp.parallel.engine import Engine
from ringdp.parallel.replicas import gather_json


def save(
    path: str | os.PathLike[str],
    engine: Engine,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write parameters, buffers, the optimizer's state and `extra` (JSON) to directory `path`.

    Collective. Until it is complete, and if a rank dies at any moment, `path` holds what it held
    before. It must be on a disk that all ranks see. Raises CheckpointError on every rank if any of
    them cannot write.
    """
    path, comm = Path(path), engine.comm
    found = pieces(engine)
    index = Index(
        directory=gather_json(comm, f"data-{secrets.token_hex(8)}")[0],
        ranks=comm.size,
        stage=engine.stage.number,
        tensors={},
        scalars={},
        groups=groups_of(optimizer, found) if optimizer else None,
        extra=extra or {},
    )
    try:
        json.dumps([index.groups, index.extra])
    except TypeError as e:
        raise CheckpointError(f"extra, or an option of the optimizer, is not JSON: {e}") from e
    tensors, shapes, scalars = _own(engine, optimizer, found)
    directory = path / index.directory
    problem = ""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tensorfile.write(file_of(directory, comm.rank), {k: t for k, (t, _) in tensors.items()})
    except OSError as e:
        problem = f"rank {comm.rank}: {e}"
    facts = {
        key: [tensorfile.dtype_name(t.dtype), shapes[key], begin, begin + t.numel()]
        for key, (t, begin) in tensors.items()
    }
    every = gather_json(comm, [problem, facts, scalars])
    _raise([said for said, _, _ in every])
    for rank, (_, theirs, values) in enumerate(every):
        index.scalars |= values
        for key, (dtype, shape, begin, end) in theirs.items():
            entry = index.tensors.setdefault(key, Entry(dtype, shape))
            entry.parts.append(Part(rank, begin, end))
    if comm.rank == 0:
        try:
            commit(path, index)
        except OSError as e:
            problem = f"rank 0: {e}"
    _raise(gather_json(comm, problem))


def _own(
    engine: Engine, optimizer: torch.optim.Optimizer | None, found: list[Piece]
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
        for name, buffer in persistent_buffers(engine.model).items():
            key = f"buffer/{name}"
            tensors[key], shapes[key] = (buffer.detach().reshape(-1), 0), list(buffer.shape)
    return tensors, shapes, scalars


def persistent_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {
        name: value
        for name, value in model.state_dict().items()
        if name not in parameters and isinstance(value, Tensor)
    }


def _raise(problems: list[str]) -> None:
    said = [p for p in problems if p]
    if said:
        raise CheckpointError(f"the checkpoint was not written; {'; '.join(said)}")
