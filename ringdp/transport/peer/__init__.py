"""Programs run by a CUDA kernel over peer memory: memory that every rank's GPU can access."""
