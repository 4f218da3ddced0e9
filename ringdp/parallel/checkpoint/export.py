"""Export: the whole state_dict in one safetensors file, for a model without ringdp."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from ringdp.errors import CheckpointError
from ringdp.parallel.checkpoint import tensorfile
from ringdp.parallel.checkpoint.index import sync_directory
from ringdp.parallel.engine import Engine
from ringdp.parallel.replicas import gather_json


def export(path: str | os.PathLike[str], engine: Engine) -> None:
    """Write what `model.state_dict()` would be in one process, as at rest. Collective.

    Every rank holds the whole model meanwhile; rank 0 writes it aside, then renames it to `path`.
    A tied weight is there under all its names, as a plain model's load_state_dict asks for.
    """
    path, problem = Path(path), ""
    with engine.full_parameters():
        if engine.comm.rank == 0:
            state = {k: v for k, v in engine.model.state_dict().items() if isinstance(v, Tensor)}
            aside = path.with_name(path.name + ".new")
            try:
                tensorfile.write(aside, state)
                os.replace(aside, path)
                sync_directory(path.parent)
            except OSError as e:
                problem = f"rank 0: {e}"
        problem = gather_json(engine.comm, problem)[0]
    if problem:
        raise CheckpointError(f"{path} was not written; {problem}")
