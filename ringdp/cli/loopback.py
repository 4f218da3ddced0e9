"""A rendezvous for ranks of this host only: a store that listens on the loopback interface.

torch's own backends start stores that listen on every interface of the host.
"""

import socket
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "ringdp-loopback"
HOST = "127.0.0.1"


def register() -> str:
    """Register with torch's launcher; return the backend's name there."""
    rendezvous_handler_registry.register(BACKEND, Loopback)
    return BACKEND


def loopback_store(timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """A store that only processes of this host can reach."""
    listening = socket.create_server((HOST, 0))
    return TCPStore(
        HOST,
        listening.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def environment(port: int, ranks: int, rank: int | None = None) -> dict[str, str]:
    """torchrun's environment variables, for ranks that meet at another process's store."""
    own = {} if rank is None else {"RANK": str(rank)}
    return own | {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


class Loopback(RendezvousHandler):
    """A rendezvous of one launcher, whose ranks use its store."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._store = loopback_store()

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        mine: Store = PrefixStore("launcher", self._store)
        return RendezvousInfo(mine, 0, 1, RendezvousStoreInfo(HOST, self._store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else is here to be told."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True
