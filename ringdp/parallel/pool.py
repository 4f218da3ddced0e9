"""Reuses the host memory of a freed unit for the next unit that is gathered.

malloc returns freed blocks of 32 MiB and more to the system at once, and smaller ones unless
`transport.heap` keeps them; getting them back costs a page fault for every 4 KiB. On CUDA torch's
caching allocator does this.
"""

from __future__ import annotations

import torch

_SWAPS = hasattr(torch.UntypedStorage, "_swap_data_ptr_")  # not in every torch


class Pool:
    """Spare memory never adds to the peak: all of it is freed before more is allocated. Whoever
    allocates memory for a unit elsewhere calls `let_go` first."""

    def __init__(self) -> None:
        self._kept: list[torch.UntypedStorage] = []

    def fill(self, storage: torch.UntypedStorage, size: int) -> None:
        """Give an empty storage `size` uninitialized bytes."""
        for at, kept in enumerate(self._kept):
            if kept.nbytes() == size:
                _swap(storage, self._kept.pop(at))
                return
        self.let_go()
        storage.resize_(size)

    def let_go(self) -> None:
        self._kept.clear()

    def empty(self, storage: torch.UntypedStorage) -> None:
        """Take a storage's memory. Tensors that view it see what it is given next."""
        if not _swaps(storage):
            storage.resize_(0)
            return
        kept = torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
        _swap(storage, kept)
        self._kept.append(kept)


def beside(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor to `fill` for `tensor`, with empty memory of its own until `show`; where storages do
    not swap memory, with that of `tensor`."""
    if not _swaps(tensor.untyped_storage()):
        return tensor.data
    made = torch.empty_like(tensor)
    made.untyped_storage().resize_(0)
    return made


def show(filled: torch.Tensor, tensor: torch.Tensor) -> None:
    """Give `tensor`, which is empty, the memory of what was made beside it."""
    if filled.data_ptr() != tensor.data_ptr():
        _swap(tensor.untyped_storage(), filled.untyped_storage())


def _swaps(storage: torch.UntypedStorage) -> bool:
    return _SWAPS and storage.device.type == "cpu"


def _swap(a: torch.UntypedStorage, b: torch.UntypedStorage) -> None:
    a._swap_data_ptr_(b)  # type: ignore[attr-defined]
