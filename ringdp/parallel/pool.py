"""Memory that one gathered unit has left, for the next.

Of what malloc is given back, blocks from 32 MiB on go to the system at once, and smaller ones where
`transport.heap` does not keep them. They come from there as a page fault for each 4 KiB. On CUDA
torch's allocator keeps memory itself.
"""

from __future__ import annotations

import torch

_SWAPS = hasattr(torch.UntypedStorage, "_swap_data_ptr_")  # not in every torch


class Pool:
    """With what is in use never more than was in use at the worst moment: before more memory is
    taken, all that is spare is let go. Who takes some for a unit elsewhere lets go first."""

    def __init__(self) -> None:
        self._kept: list[torch.UntypedStorage] = []

    def fill(self, storage: torch.UntypedStorage, size: int) -> None:
        """Give an empty storage so many bytes of whatever is in them."""
        for at, kept in enumerate(self._kept):
            if kept.nbytes() == size:
                _swap(storage, self._kept.pop(at))
                return
        self.let_go()
        storage.resize_(size)

    def let_go(self) -> None:
        self._kept.clear()

    def empty(self, storage: torch.UntypedStorage) -> None:
        """Take a storage's memory; tensors that view it find what `fill` puts there next."""
        if not _SWAPS or storage.device.type != "cpu":
            storage.resize_(0)
            return
        kept = torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
        _swap(storage, kept)
        self._kept.append(kept)


def _swap(a: torch.UntypedStorage, b: torch.UntypedStorage) -> None:
    a._swap_data_ptr_(b)  # type: ignore[attr-defined]
