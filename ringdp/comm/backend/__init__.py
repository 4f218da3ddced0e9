"""The torch.distributed backend "ringdp": runs torch's collectives on a Communicator.

    dist.init_process_group("ringdp")  # or "cpu:ringdp,cuda:ringdp"; after `import ringdp`

`import ringdp` registers it. `groups` has the `torch.distributed.ProcessGroup` that torch creates.
Its methods are in `reductions` and `moves`, and return the works in `works`. torch
calls some methods by several names, with or without options objects.

All ranks must be on one host; between hosts use torch's gloo.
"""

import torch
from torch.distributed import Backend, distributed_c10d

from ringdp.comm.backend.groups import NAME, Group, create
from ringdp.comm.backend.works import GroupWork, Watcher
from ringdp.comm.graph_break import as_they_are


def register() -> None:
    """Register the backend with torch.distributed. Idempotent."""
    if NAME.upper() not in Backend._plugins:
        as_they_are(Group, GroupWork, Watcher)
        # With CUDA listed, torch's ShardedTensor is gathered there, whether or not there is a GPU.
        cuda = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
        devices = ["cpu", "cuda"] if cuda else ["cpu"]
        Backend.register_backend(NAME, create, extended_api=True, devices=devices)
        # From torch 2.15 on, torch attaches a recorder to other groups, which must be in C++ then.
        recorded: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        recorded.add(NAME)
