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

    @torch.inference_mode(False)  # its values may come outside of it
    def fill(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        """A flat tensor of `size` uninitialized bytes, for `tensor`, whose storage is empty. Views
        of `tensor` see them from `show` on; where storages do not swap memory, at once."""
        for at, kept in enumerate(self._kept):
            if kept.nbytes() == size:
                return tensor.new_empty(0).set_(self._kept.pop(at))
        self.let_go()
        storage = tensor.untyped_storage()
        if _swaps(storage):
            storage = torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
        storage.resize_(size)
        return tensor.new_empty(0).set_(storage)

    def show(self, filled: torch.Tensor, tensor: torch.Tensor) -> None:
        """`tensor` gets the memory of what `fill` returned for it."""
        if _swaps(tensor.untyped_storage()):
            _swap(tensor.untyped_storage(), filled.untyped_storage())

    def let_go(self) -> None:
        self._kept.clear()

    def empty(self, storage: torch.UntypedStorage) -> None:
        """Take a storage's memory. Tensors that view it see what `show` gives it next."""
        if not _swaps(storage):
            storage.resize_(0)
            return
        kept = torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
        _swap(storage, kept)
        self._kept.append(kept)


def _swaps(storage: torch.UntypedStorage) -> bool:
    return _SWAPS and storage.device.type == "cpu"


def _swap(a: torch.UntypedStorage, b: torch.UntypedStorage) -> None:
    a._swap_data_ptr_(b)  # type: ignore[attr-defined]
