"""Where ranks of this host meet: a store that listens on the loopback interface only.

torch's own launcher starts one that listens on every interface of the host.
"""

import socket

from torch._C._distributed_c10d import TCPStore

HOST = "127.0.0.1"


def loopback_store() -> TCPStore:
    """A store that only processes of this host can reach."""
    listening = socket.create_server((HOST, 0))
    return TCPStore(
        HOST,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def environment(port: int, ranks: int, rank: int | None = None) -> dict[str, str]:
    """torchrun's environment variables, for ranks that meet at another process's store.

    Also gloo's network interface: it would look up this host's name for every communicator.
    """
    own = {} if rank is None else {"RANK": str(rank)}
    return own | {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
