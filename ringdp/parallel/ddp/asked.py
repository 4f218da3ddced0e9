"""What torch's Reducer tells when it is asked, under its names."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


class Asked:
    """The part of a Reducer that is there to be found."""

    _users: list[int]  # ranks, of each parameter
    _steady: bool
    _handles: list[RemovableHandle]

    def _get_local_used_map(self) -> Tensor:
        """How many ranks have used each parameter in the last backward that sought the unused."""
        return torch.tensor(self._users, dtype=torch.int32)

    def _ddp_graph_static(self) -> bool:
        """Whether every backward so far has left the same parameters unused on this rank."""
        return self._steady

    def _remove_autograd_hooks(self) -> None:
        """It hears of no gradient any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
