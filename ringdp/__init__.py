"""ringdp: collectives and data-parallel training (DDP, ZeRO-1, 2, 3) from scratch."""

from ringdp.comm import Communicator, Work, init
from ringdp.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicationError,
    PeerLost,
    RingdpError,
    ScheduleError,
    UsageError,
)

__all__ = [
    "CollectiveMismatch",
    "CollectiveTimeout",
    "CommunicationError",
    "Communicator",
    "PeerLost",
    "RingdpError",
    "ScheduleError",
    "UsageError",
    "Work",
    "init",
]
