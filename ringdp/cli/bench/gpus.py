"""GPUs for contenders: which one a rank takes, and calls that are over there.

NCCL refuses two ranks of one host on one GPU. Where there are fewer GPUs than ranks, each rank says
it is a host of its own; NCCL then goes over sockets: slow, and fair to all who are over it. There
kernels over peer memory take turns, slower still.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

NCCL, PEER, TORCHS = "nccl", "peer", "torch-nccl"
OURS = (NCCL, PEER)
CONTENDERS = (*OURS, TORCHS)
SOCKETS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}


def take(contender: str) -> tuple[str, str]:
    """Makes this rank's the current one. Returns its name, and what to add to a contender's."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    torch.cuda.set_device(rank % gpus)
    device = f"cuda:{rank % gpus}"
    if gpus >= ranks:
        return device, ""
    if contender == PEER:
        return device, f", {gpus} GPUs: by turns"
    os.environ |= SOCKETS | {"NCCL_HOSTID": f"ringdp-{rank}"}
    return device, f", {gpus} GPUs: through sockets"


def ended(call: Callable[[], object]) -> None:
    """Made, and what it started is over."""
    call()
    torch.cuda.synchronize()
