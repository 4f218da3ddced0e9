"""Launches of an earlier call, repeated for tensors at the same addresses.

An allocator gives the tensors of a step the addresses of the previous step's. Checking them and
working out what to launch takes the host several times as long as a launch. So it is done once for
tensors that agree in everything that checks and launchers look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from ringdp import _core

from .jit import Launch

KEPT = 1024  # calls of a function
KEPT_BYTES = 16 << 20  # of their tensors on devices; the last call's are always kept
# The tensors' part of a key, from C++; None if Python has to look at each tensor, which takes 25 µs
# more for 64 of them [measured].
seen = _core.Tensors(Tensor.__dlpack_c_exchange_api__, Tensor, torch.nn.Parameter).seen

Key = tuple[object, ...]


def key(tensors: list[Tensor], offsets: Sequence[int] | None = None) -> Key | None:
    """Return a key, equal for the same stream, offsets, and addresses, dtypes, devices, shapes and
    strides of the tensors. None if the call must not be repeated: on a device that is not the
    current one, and in the capture of a CUDA graph."""
    device, stream = tensors[-1].get_device(), 0
    if device >= 0:
        if device != torch._C._cuda_getDevice():  # torch.cuda.current_device() takes twice as long
            return None
        stream = torch._C._cuda_getCurrentRawStream(device)
        if stream and torch.cuda.is_current_stream_capturing():  # the default stream, 0, cannot be
            return None
    return seen(tensors, offsets) or _described(tensors, offsets), stream


def _described(tensors: list[Tensor], offsets: Sequence[int] | None) -> tuple[object, ...]:
    described = ((x.data_ptr(), x.dtype, x.device, x.shape, x.stride()) for x in tensors)
    return *described, None if offsets is None else tuple(offsets)


class Repeats:
    """The launches of a function's calls."""

    def __init__(self) -> None:
        # The oldest is first.
        self._kept: dict[Key | None, tuple[Sequence[Launch], Sequence[Tensor]]] = {}
        self._lock = Lock()

    def again(self, key: Key | None, *late: Any) -> bool:
        """Repeat the launches kept for this key, with `late` as the values of `unspecialized`.
        Returns False if there are none."""
        kept = self._kept.get(key)
        if kept is None:
            return False
        for run, before, after in kept[0]:
            run(*before, *late, *after)
        return True

    def keep(
        self, key: Key | None, launches: Sequence[Launch | None], held: Sequence[Tensor] = ()
    ) -> None:
        """Keep launches for this key, with `held`: tensors that they need and nobody else keeps,
        allocated on the launches' stream."""
        made = [launch for launch in launches if launch is not None]
        if key is None or len(made) < len(launches):
            return
        with self._lock:
            self._kept[key] = made, held
            for oldest in list(self._kept)[:-1]:
                if len(self._kept) <= KEPT and self._bytes() <= KEPT_BYTES:
                    break
                del self._kept[oldest]

    def _bytes(self) -> int:
        return sum(x.nbytes for _, held in self._kept.values() for x in held)
