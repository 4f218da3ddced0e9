"""Programs run by a CUDA kernel over memory that the ranks' GPUs can reach."""
