"""Export: the whole state_dict in one safetensors file, for a model without ringdp."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from ringdp.parallel.checkpoint import tensorfile
from ringdp.parallel.checkpoint.index import sync_directory
from ringdp.parallel.checkpoint.together import together
from ringdp.parallel.engine import Engine


def export(path: str | os.PathLike[str], engine: Engine) -> None:
    """Write what `model.state_dict()` would be in one process, as at rest. Collective.

    Every rank holds the whole model meanwhile; rank 0 writes it aside, then renames it to `path`.
    A tied weight is there under all its names, as a plain model's load_state_dict asks for. Raises
    CheckpointError, on every rank, if it cannot be written; then nothing is left behind.
    """
    path = Path(path)
    aside = path.with_name(path.name + ".new")
    with engine.full_parameters(), together(engine.comm, f"{path} was not written"):
        if engine.comm.rank == 0:
            state = {k: v for k, v in engine.model.state_dict().items() if isinstance(v, Tensor)}
            try:
                tensorfile.write(aside, state, {k: [0] * t.ndim for k, t in state.items()})
                os.replace(aside, path)
                sync_directory(path.parent)
            finally:
                aside.unlink(missing_ok=True)
