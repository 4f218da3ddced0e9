"""The torch.distributed backend "ringdp": what torch communicates goes over a Communicator.

    dist.init_process_group("ringdp")  # or "cpu:ringdp,cuda:ringdp"; after `import ringdp`

`import ringdp` registers it. For torch a group is a `torch.distributed.ProcessGroup` whose methods
are `reductions`, `moves` and `messages`, on the `groups` that torch makes; `works` is what they
return. torch calls some methods by more than one name, with options objects or without.

Ranks of one host only: what talks between hosts is torch's own gloo.
"""

from torch.distributed import Backend

from ringdp.comm.backend.groups import NAME, create


def register() -> None:
    """Make torch.distributed know the backend. It may be called again."""
    if NAME.upper() not in Backend._plugins:
        Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
