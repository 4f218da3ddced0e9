"""Files of named tensors in the safetensors format, written whole and read in parts.

    8 bytes: length of the header · the header, JSON · the tensors' bytes, one behind the other

Nothing in it is code, so nothing is unpickled.
"""

from __future__ import annotations

import json
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


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors, and wait until the disk has them."""
    header: dict[str, Any] = {}
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
            self.header = json.loads(self._file.read(length)) if self.size >= 0 else {}
        except (OSError, ValueError) as e:
            raise CheckpointError(f"{path} cannot be read as safetensors: {e}") from e
        self._data = 8 + length

    def read(self, name: str, begin: int, end: int) -> Tensor:
        """Elements begin..end of a tensor, as a 1-D tensor of its own."""
        entry = self.header.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        dtype = _DTYPES[entry["dtype"]]
        first, last = entry["data_offsets"]
        out = torch.empty(end - begin, dtype=dtype)
        if not 0 <= begin <= end <= (last - first) // dtype.itemsize or last > self.size:
            raise CheckpointError(f"{self.path} ends within tensor {name}: it is cut off")
        if out.numel():
            self._file.seek(self._data + first + begin * dtype.itemsize)
            self._file.readinto(out.view(torch.uint8).numpy().data)
        return out

    def close(self) -> None:
        self._file.close()
