"""Files of named tensors in the safetensors format, which has no code in it.

Each file also has its tensors' offsets in the whole ones, as torch's distributed checkpoint writes
them, so that its HuggingFaceStorageReader reads these files too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ringdp.errors import CheckpointError


def dtype_of(name: str) -> torch.dtype:
    """Raises CheckpointError if torch has no such dtype."""
    if not isinstance(dtype := getattr(torch, name, None), torch.dtype):
        raise CheckpointError(f"torch has no dtype {name!r}")
    return dtype


def write(path: Path, tensors: Mapping[str, Tensor], offsets: Mapping[str, list[int]]) -> None:
    """Write the tensors and fsync. `offsets`: of each tensor's first element in the whole one."""
    places = {name: {"saved_offsets": offset} for name, offset in offsets.items()}
    about = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
    path.touch()
    mode = path.stat().st_mode  # the user's, where safetensors makes a file that is private
    try:
        save_file(dict(_apart(tensors)), path, about)
    except (SafetensorError, ValueError, KeyError) as e:
        raise CheckpointError(f"{path} cannot be written as safetensors: {e}") from e
    path.chmod(mode)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _apart(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Contiguous tensors that do not share memory, as safetensors requires."""
    end = 0
    whole = [(name, t.detach().contiguous().resolve_conj()) for name, t in tensors.items()]
    for name, t in sorted(whole, key=lambda named: named[1].data_ptr()):
        yield name, t.clone() if t.data_ptr() < end else t
        end = max(end, t.data_ptr() + t.nbytes)


class TensorFile:
    """A file of 1-D tensors, open for reading. Raises CheckpointError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: Any = safe_open(path, "pt")
        except (SafetensorError, OSError) as e:
            raise CheckpointError(f"{path} cannot be read as safetensors: {e}") from e

    def dtype_and_elements(self, name: str) -> tuple[torch.dtype, int]:
        try:
            tensor = self._file.get_slice(name)
            (elements,) = tensor.get_shape()
            return tensor[:0].dtype, elements
        except (SafetensorError, ValueError) as e:
            raise CheckpointError(f"{self.path} has no 1-D tensor {name}: {e}") from e

    def read(self, name: str, begin: int, end: int) -> Tensor:
        """Elements begin..end of a tensor that has them, as a tensor of its own."""
        with torch.device("cpu"):  # safetensors moves it to the default device
            values: Tensor = self._file.get_slice(name)[begin:end]
        return values.clone()  # not a view of the mapped file
