"""Finds the communicator for what a user passes: a communicator, a torch group or None."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, group, is_available, is_initialized

from ringdp.comm.communicator import Communicator
from ringdp.comm.rendezvous import TransportName, last, over
from ringdp.errors import UsageError

_made: WeakKeyDictionary[ProcessGroup, dict[TransportName, Communicator]] = WeakKeyDictionary()


def communicator_of(ranks: object = None, tensors: Iterable[Tensor] = ()) -> Communicator:
    """Return the communicator for `ranks`.

    A Communicator is returned as is. A torch.distributed group gets a communicator over its ranks.
    None is the last communicator from `ringdp.init`, or else that over torch's default group.

    Over a group it uses NCCL if the `tensors` to be moved are on a GPU, and else shared memory. If
    they have no device yet, it uses NCCL if the group only supports GPUs. The first call for a
    group is collective over it. Raises UsageError if `ranks` is something else, or is None and
    there is no communicator.
    """
    if ranks is None:
        if comm := last():
            return comm
        if not (is_available() and is_initialized()):
            raise UsageError(
                "no communicator: call ringdp.init() or torch.distributed.init_process_group() "
                "first, or give one"
            )
        ranks = group.WORLD
    if isinstance(ranks, Communicator):
        return ranks
    if not isinstance(ranks, ProcessGroup):
        raise UsageError(
            f"{ranks!r} stands for no ranks; allowed: a ringdp.Communicator, a torch.distributed "
            "group, or None"
        )
    places = {x.device for x in tensors if not x.is_meta}
    gpu = next((place for place in places if place.type == "cuda"), None)
    # Of the backends only NCCL supports no CPU; gloo and ringdp support both.
    only_gpus = {place.type for place in ranks._device_types} == {"cuda"}
    transport: TransportName = "nccl" if gpu or (only_gpus and not places) else "shm"
    communicators = _made.setdefault(ranks, {})
    if transport not in communicators or communicators[transport].ended:
        with torch.cuda.device(gpu) if gpu else nullcontext():
            communicators[transport] = over(ranks, transport=transport)
    return communicators[transport]
