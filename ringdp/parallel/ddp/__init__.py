"""DistributedDataParallel: torch's, over ringdp's collectives."""

from ringdp.parallel.ddp.torch_api import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
