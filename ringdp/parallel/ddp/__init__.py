"""DistributedDataParallel: torch's, over ringdp's collectives."""

from ringdp.parallel.ddp.module import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
