"""Export: the whole state_dict in one safetensors file, for a model without ringdp."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from torch import Tensor

from ringdp.errors import CheckpointError
from ringdp.parallel.checkpoint import tensorfile
from ringdp.parallel.checkpoint.index import sync_directory
from ringdp.parallel.checkpoint.together import together
from ringdp.parallel.engine import Engine, check_engine


def export(path: str | os.PathLike[str], engine: Engine) -> None:
    """Write what `model.state_dict()` would be in one process, in the dtypes at rest. Collective.

    Every rank holds the whole model meanwhile; rank 0 writes it into a hidden directory beside
    `path`, or the file that it links to, then renames it. The next export removes what a killed one
    has left there. A tied weight is written under all its names, as a plain model's load_state_dict
    expects. Extra state that is no tensor is left out, since safetensors has only tensors. Raises
    CheckpointError, on every rank, if it cannot be written; then nothing is left behind.
    """
    check_engine("export", engine)
    with engine.full_parameters(), together(engine.comm, f"{path} was not written"):
        if engine.comm.rank == 0:
            state = {k: v for k, v in engine.model.state_dict().items() if isinstance(v, Tensor)}
            file = Path(path).resolve()
            if file.exists() and not file.is_file():  # a rename would replace /dev/null, say
                raise CheckpointError(f"{file} exists, and is no file")
            aside = file.with_name(f".{file.name}.ringdp")
            try:
                shutil.rmtree(aside, ignore_errors=True)  # of one that was killed
                aside.mkdir()  # safetensors puts files of its own beside the one it writes
                places = {k: [0] * t.ndim for k, t in state.items()}
                tensorfile.write(aside / file.name, state, places)
                os.replace(aside / file.name, file)
                sync_directory(file.parent)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
