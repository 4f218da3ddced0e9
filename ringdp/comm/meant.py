"""Which communicator is meant where a user names ranks, in torch's way or in ours, or does not."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup, group, is_available, is_initialized

from ringdp.comm.communicator import Communicator
from ringdp.comm.rendezvous import last, over
from ringdp.errors import UsageError

_made: WeakKeyDictionary[ProcessGroup, Communicator] = WeakKeyDictionary()


def communicator_of(ranks: object = None) -> Communicator:
    """A communicator itself; that over a torch.distributed group; for None what `ringdp.init` made
    last, or else that over torch's default group.

    Collective over a group, the first time. Raises UsageError for what is neither, or not there.
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
    if ranks not in _made or _made[ranks].ended:
        _made[ranks] = over(ranks)
    return _made[ranks]
