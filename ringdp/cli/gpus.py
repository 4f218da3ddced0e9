"""GPUs: which one each rank uses, and which transports need one.

NCCL refuses to run two ranks of a host on one GPU. With fewer GPUs than ranks, each rank claims to
be a host of its own, and NCCL goes over sockets, which is slow but equally so for all contenders.
Kernels over peer memory then take turns on the GPU, which is slower still.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from ringdp.cli.checks import one_of
from ringdp.comm.rendezvous import TRANSPORTS
from ringdp.errors import UsageError

NCCL, PEER, TORCHS = "nccl", "peer", "torch-nccl"
ON_GPU = (NCCL, PEER)  # of ringdp's transports
CONTENDERS = (*ON_GPU, TORCHS)
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
    """Raise UsageError for an unknown transport, or one that needs a GPU where there is none."""
    one_of("--transport", name, TRANSPORTS)
    if name in ON_GPU and not torch.cuda.is_available():
        raise UsageError(
            f"--transport {name} needs a CUDA GPU, and torch {torch.__version__} finds none here; "
            f"allowed: {name}-host, which is its code over host memory"
        )


def take(contender: str) -> tuple[str, str]:
    """Make this rank's GPU the current device.

    Returns the device's name, and a remark to append to the contender's version.
    """
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
    """Call, and wait until the GPU has finished what that started."""
    call()
    torch.cuda.synchronize()
