"""Which communicator is meant where a user names ranks, in torch's way or in ours, or does not."""

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
    """A communicator itself; that over a torch.distributed group; for None what `ringdp.init` made
    last, or else that over torch's default group.

    Over a group it goes through shared memory, or where `tensors`, which are to be moved, are on a
    GPU, over NCCL on that; where they are nowhere yet, as the group does. Collective over a group,
    the first time. Raises UsageError for what is neither, or not there.
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
    # NCCL alone serves no CPU; gloo, and ringdp's own backend, serve both.
    only_gpus = {place.type for place in ranks._device_types} == {"cuda"}
    transport: TransportName = "nccl" if gpu or (only_gpus and not places) else "shm"
    made = _made.setdefault(ranks, {})
    if transport not in made or made[transport].ended:
        with torch.cuda.device(gpu) if gpu else nullcontext():
            made[transport] = over(ranks, transport=transport)
    return made[transport]
