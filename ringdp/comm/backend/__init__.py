"""The torch.distributed backend "ringdp": what torch communicates goes over a Communicator.

    dist.init_process_group("ringdp")  # or "cpu:ringdp,cuda:ringdp"; after `import ringdp`

`import ringdp` registers it. For torch a group is a `torch.distributed.ProcessGroup` whose methods
are `reductions`, `moves` and `messages`, on the `groups` that torch makes; `works` is what they
return. torch calls some methods by more than one name, with options objects or without.

Ranks of one host only: what talks between hosts is torch's own gloo.
"""

from torch.distributed import Backend, distributed_c10d

from ringdp.comm.backend.calls import Calls
from ringdp.comm.backend.groups import NAME, Group, create
from ringdp.comm.backend.messages import Messages
from ringdp.comm.backend.moves import Moves
from ringdp.comm.backend.reductions import Reductions
from ringdp.comm.backend.works import GroupWork, Watcher
from ringdp.comm.graph_break import as_they_are


def register() -> None:
    """Make torch.distributed know the backend. It may be called again."""
    if NAME.upper() not in Backend._plugins:
        as_they_are(Group, Calls, Reductions, Moves, Messages, GroupWork, Watcher)
        Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
        # From torch 2.15 on, a recorder is attached to other groups, which only C++ calls.
        recorded: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        recorded.add(NAME)
