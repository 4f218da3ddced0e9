"""Save: every rank writes what it owns, then rank 0 commits. See `index` for crashes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
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
    as_json,
    checked,
    clean,
    commit,
    file_of,
    new_directory,
)
from ringdp.parallel.checkpoint.plan import names_of, planned
from ringdp.parallel.checkpoint.spans import (
    Optimizers,
    Piece,
    groups_of,
    optimizers_given,
    persistent_buffers,
    pieces,
    stepped,
)
from ringdp.parallel.checkpoint.together import together
from ringdp.parallel.engine import Engine
from ringdp.parallel.optimizer.state import check_single, flattened, is_per_element
from ringdp.parallel.replicas import gather_json

NOT_WRITTEN = "the checkpoint was not written"


def save(
    path: str | os.PathLike[str],
    engine: Engine,
    optimizer: Optimizers = None,
    *,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write parameters, buffers, the state of the optimizer, or of a list of some, and `extra`
    (JSON) to directory `path`, and modules' get_extra_state() if it is JSON and tensors.
    Collective.

    Until it is complete, and if a rank dies at any moment, `path` holds what it held before. It
    must be the same directory on every rank, on a shared disk, where no other job saves meanwhile:
    a save removes what others have left. Raises CheckpointError on every rank if any rank cannot
    write, or has something that a checkpoint cannot hold.
    """
    optimizers = optimizers_given("save", engine, optimizer)
    path, comm = Path(path), engine.comm
    found = pieces(engine)
    name = gather_json(comm, new_directory())[0]
    directory = path / name
    try:
        with together(comm, NOT_WRITTEN):
            modules, states = pack(engine.model)
            for one in optimizers:
                engine.take(one)
            own = _RankData(engine, optimizers, found, states)
            groups = groups_of(optimizers, found) if optimizers else None
            about = [groups, extra or {}, modules, names_of(optimizers)]
            _check_json([own.scalars, about])
            directory.mkdir(parents=True, exist_ok=True)
            tensorfile.write(file_of(directory, comm.rank), own.tensors, own.places())
        mine = [own.facts, own.scalars, about if comm.rank == 0 else None]
        theirs = gather_json(comm, mine)
        with together(comm, NOT_WRITTEN):
            index = _index(name, engine, theirs)
            planned(index, engine, optimizers, found)  # what could not be loaded is not committed
        with together(comm, NOT_WRITTEN):
            if comm.rank == 0:
                _check_files(directory, comm.size)
                commit(path, index)
    except CheckpointError:
        shutil.rmtree(directory, ignore_errors=True)  # the disk may be full, or not the others'
        raise
    with together(comm, "the checkpoint is written, but what it replaces could not be removed"):
        if comm.rank == 0:
            clean(path, index)


def _check_files(directory: Path, ranks: int) -> None:
    if missing := [r for r in range(ranks) if not file_of(directory, r).exists()]:
        raise CheckpointError(
            f"{directory.absolute()} has no file of ranks {missing}: they wrote elsewhere; all "
            "must be given one directory, on a disk that all see"
        )


def _check_json(values: Any) -> None:
    try:
        json.dumps(values)
        _check_keys(values, "extra")
    except (TypeError, ValueError) as e:
        raise CheckpointError(
            f"extra, or what the optimizer has beside tensors, is not JSON: {e}"
        ) from e


def _check_keys(value: Any, name: str) -> None:
    """Raise TypeError for a key that JSON would turn into a string. `name`: of the dict, if any."""
    if isinstance(value, dict):
        for key, v in value.items():
            if not isinstance(key, str):
                raise TypeError(f"keys must be strings, and {key!r} of {name} is none")
            _check_keys(v, key)
    for v in value if isinstance(value, list | tuple) else ():
        _check_keys(v, name)


class _RankData:
    """What this rank writes: tensors, and for the index their facts, and scalars."""

    def __init__(
        self,
        engine: Engine,
        optimizers: Sequence[torch.optim.Optimizer],
        found: list[Piece],
        states: dict[str, Tensor],
    ) -> None:
        """`states`: the tensors in modules' extra state."""
        self.tensors: dict[str, Tensor] = {}
        self.facts: dict[str, list[Any]] = {}  # dtype, whole shape, begin, end, shape if single
        self.scalars: dict[str, list[Any]] = {}
        rank = engine.comm.rank
        for piece in found:
            if _writes(rank, piece):
                key, values = f"parameter/{piece.name}", piece.own(piece.rest)
                self._tensor(key, values, piece.shape, piece.writes)
        for optimizer, piece in stepped(engine, optimizers, found):
            state = optimizer.state.get(piece.parameter)
            if state and _writes(rank, piece):
                for name, value in flattened(optimizer, state, piece.name).items():
                    self._state(optimizer, piece, name, value)
        if rank == 0:
            buffers = {f"buffer/{n}": b for n, b in persistent_buffers(engine.model).items()}
            for key, value in (buffers | states).items():
                self._tensor(key, value, list(value.shape), (0, value.numel()))

    def places(self) -> dict[str, list[int]]:
        """The offset of each tensor's first element in the whole one."""
        return {k: [begin * (single is None)] for k, (_, _, begin, _, single) in self.facts.items()}

    def _state(self, optimizer: torch.optim.Optimizer, piece: Piece, name: Any, value: Any) -> None:
        if not isinstance(name, str) or "/" in name:
            raise CheckpointError(f"the optimizer has state {name!r}; allowed: names without /")
        key = f"optimizer/{name}/{piece.name}"
        if not isinstance(value, Tensor):
            self.scalars[key] = [*piece.writes, value]
        elif is_per_element(name, value, piece.rest.shape):
            self._tensor(key, piece.own(value), piece.shape, piece.writes)
        else:
            check_single(optimizer, name, value, piece.name)
            self._tensor(key, value, piece.shape, piece.writes, list(value.shape))

    def _tensor(
        self,
        key: str,
        value: Tensor,
        shape: list[int],
        span: tuple[int, int],
        single: list[int] | None = None,
    ) -> None:
        self.tensors[key] = value.detach().reshape(-1)
        self.facts[key] = [str(value.dtype).removeprefix("torch."), shape, *span, single]


def _writes(rank: int, piece: Piece) -> bool:
    """Rank 0 writes what has no elements."""
    return piece.writes[0] < piece.writes[1] or (0 in piece.shape and rank == 0)


def _index(directory: str, engine: Engine, ranks: list[list[Any]]) -> Index:
    """Of all ranks' facts and scalars, and rank 0's groups, extra, modules and optimizer."""
    index = Index(directory, engine.comm.size, engine.stage.number, {}, {}, *ranks[0][2])
    several = set()  # of which a rank has one value for each of its several elements
    for rank, (facts, scalars, _) in enumerate(ranks):
        for key, (dtype, shape, begin, end, single) in facts.items():
            entry = index.tensors.setdefault(key, Entry(dtype, shape))
            if dtype != entry.dtype:
                raise CheckpointError(f"{key} is {dtype} on rank {rank}, {entry.dtype} on another")
            entry.parts.append(Part(rank, begin, end))
            if single is not None:  # so it is for a rank with one element, whose tensor fits both
                entry.single = single
            elif end - begin != 1:
                several.add(key)
        for key, part in scalars.items():
            index.scalars.setdefault(key, []).append(part)
    for key in several:
        if index.tensors[key].single is not None:
            raise CheckpointError(f"{key} is one value on a rank, one for each element on another")
    return checked(json.loads(as_json(index)))
