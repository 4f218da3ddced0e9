"""DistributedDataParallel: torch's, over ringdp's collectives."""
