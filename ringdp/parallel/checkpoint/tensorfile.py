"""Files of named tensors in the safetensors format, written whole and read in parts.

    8 bytes: length of the header · the header, JSON · the tensors' bytes, one behind the other

Nothing in it is code, so nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringdp.errors import CheckpointError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise CheckpointError(f"no safetensors name for {dtype}; there are {list(_NAMES)}")
    return _NAMES[dtype]


def dtype_of(name: str) -> torch.dtype:
    """Raises CheckpointError if torch has no such dtype."""
    if name not in _DTYPES:
        raise CheckpointError(f"no dtype for {name!r}; there are {list(_DTYPES)}")
    return _DTYPES[name]


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors, and wait until the disk has them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # which transformers asks for
    offset = 0
    for name, t in tensors.items():
        size = t.numel() * t.element_size()
        header[name] = {
            "dtype": dtype_name(t.dtype),
            "shape": list(t.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for t in tensors.values():
            if t.numel():
                data = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                file.write(data.numpy().data)
        file.flush()
        os.fsync(file.fileno())


class TensorFile:
    """One such file, open for reading. Raises CheckpointError where it is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
            length = int.from_bytes(self._file.read(8), "little")
            self.size = path.stat().st_size - 8 - length
            if self.size < 0:
                raise ValueError("it is cut off within its header")
            self.header = json.loads(self._file.read(length))
            if not isinstance(self.header, dict):
                raise ValueError("its header is no JSON object")
        except (OSError, ValueError, RecursionError) as e:
            raise CheckpointError(f"{path} cannot be read as safetensors: {e}") from e
        self._data = 8 + length

    def dtype_and_elements(self, name: str) -> tuple[str, int]:
        """What the header says of a tensor, all of whose bytes the file has."""
        first, last, dtype = self._place(name)
        return _NAMES[dtype], (last - first) // dtype.itemsize

    def read(self, name: str, begin: int, end: int) -> Tensor:
        """Elements begin..end of a tensor, as a 1-D tensor of its own."""
        first, last, dtype = self._place(name)
        have = (last - first) // dtype.itemsize
        if not 0 <= begin <= end <= have:
            raise CheckpointError(f"{self.path}: elements {begin}..{end} of {name}, of {have}")
        out = torch.empty(end - begin, dtype=dtype)
        if out.numel():
            self._file.seek(self._data + first + begin * dtype.itemsize)
            got = self._file.readinto(out.view(torch.uint8).numpy().data)
            if got != out.numel() * dtype.itemsize:
                raise CheckpointError(f"{self.path} ends within tensor {name}: it is cut off")
        return out

    def _place(self, name: str) -> tuple[int, int, torch.dtype]:
        """The tensor's first byte among the data, the one after its last, and its dtype."""
        if name not in self.header:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        try:
            entry = self.header[name]
            dtype, (first, last) = _DTYPES[entry["dtype"]], entry["data_offsets"]
            whole = math.prod(entry["shape"]) * dtype.itemsize == last - first
            if not (whole and 0 <= first <= last):
                raise ValueError(f"{entry} contradicts itself")
        except (ValueError, KeyError, TypeError) as e:
            raise CheckpointError(f"{self.path}: tensor {name} has a broken header: {e}") from e
        if last > self.size:
            raise CheckpointError(f"{self.path} ends within tensor {name}: it is cut off")
        return first, last, dtype

    def close(self) -> None:
        self._file.close()
