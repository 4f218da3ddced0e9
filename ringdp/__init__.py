"""ringdp: collectives and data-parallel training (DDP, ZeRO-1, 2, 3) from scratch."""

from ringdp.comm import Communicator, Link, Work, init
from ringdp.comm.backend import register
from ringdp.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicationError,
    ModelError,
    PeerLost,
    RingdpError,
    ScheduleError,
    UsageError,
)
from ringdp.parallel import DistributedDataParallel, Engine, SyncBatchNorm, shard

__all__ = [
    "CollectiveMismatch",
    "CollectiveTimeout",
    "CommunicationError",
    "Communicator",
    "DistributedDataParallel",
    "Engine",
    "Link",
    "ModelError",
    "PeerLost",
    "RingdpError",
    "ScheduleError",
    "SyncBatchNorm",
    "UsageError",
    "Work",
    "init",
    "shard",
]

register()
