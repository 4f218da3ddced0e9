"""GPUs for ranks: which one each takes, what needs them, and calls that are over there.

NCCL refuses two ranks of one host on one GPU. Where there are fewer GPUs than ranks, each rank says
it is a host of its own; NCCL then goes over sockets: slow, and fair to all who are over it. There
kernels over peer memory take turns, slower still.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import get_args

import torch

from ringdp.cli.checks import one_of
from ringdp.comm.rendezvous import TransportName
from ringdp.errors import UsageError

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


def check_transport(name: str) -> None:
    """Raise UsageError where there is none of that name, or it needs a GPU and there is none."""
    one_of("--transport", name, get_args(TransportName))
    if name in OURS and not torch.cuda.is_available():
        raise UsageError(
            f"--transport {name} needs a CUDA GPU, and torch {torch.__version__} finds none here; "
            f"allowed: {name}-host, which is its code over host memory"
        )


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
