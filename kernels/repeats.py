"""Launches of an earlier call, repeated by one whose tensors lie as that one's did.

An allocator gives the tensors of a step the places that those of the step before had. To check them
and to find out what to launch takes the host several times as long as a launch, so it is done once
for tensors that are seen to be the same in all that checks and launchers ask them.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from ringdp import _core

from .jit import Launch, raw_stream

KEPT = 1024  # calls of a function
KEPT_BYTES = 16 << 20  # that they hold on devices; those of the last call are kept in any case
_tensors = _core.Tensors(Tensor.__dlpack_c_exchange_api__, Tensor, torch.nn.Parameter)

Key = tuple[object, ...]


def key(tensors: list[Tensor], offsets: Sequence[int] | None = None) -> Key | None:
    """Equal for the same stream and offsets, and as many tensors of the same addresses, dtypes,
    devices, shapes and strides. None where a repetition would be none: on a device that is not the
    current one, or in the capture of a CUDA graph."""
    device = tensors[-1].get_device()
    if device >= 0 and device != torch.cuda.current_device():
        return None
    stream = raw_stream(device)
    if stream and torch.cuda.is_current_stream_capturing():  # the default stream, 0, cannot be
        return None
    return seen(tensors, offsets) or _asked(tensors, offsets), stream


def seen(tensors: list[Tensor], offsets: Sequence[int] | None) -> bytes | None:
    """What a key says of tensors; None where that must be asked of them one by one, which takes
    25 µs of 64 more [measured]."""
    return _tensors.seen(tensors, offsets)


def _asked(tensors: list[Tensor], offsets: Sequence[int] | None) -> tuple[object, ...]:
    asked = ((x.data_ptr(), x.dtype, x.device, x.shape, x.stride()) for x in tensors)
    return *asked, None if offsets is None else tuple(offsets)


class Repeats:
    """The launches of a function's calls."""

    def __init__(self) -> None:
        self._kept: dict[
            Key | None, tuple[Sequence[Launch], Sequence[Tensor]]
        ] = {}  # the oldest is first
        self._lock = Lock()

    def again(self, key: Key | None, *late: Any) -> bool:
        """Launch what was kept for this key, with such values of `unspecialized`; False if nothing
        was."""
        kept = self._kept.get(key)
        if kept is None:
            return False
        for run, before, after in kept[0]:
            run(*before, *late, *after)
        return True

    def keep(
        self, key: Key | None, launches: Sequence[Launch | None], held: Sequence[Tensor] = ()
    ) -> None:
        """`held`: what the launches need and nobody else keeps. It goes back to the allocator of
        the stream that they are on."""
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
