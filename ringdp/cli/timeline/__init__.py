"""`ringdp report`: a trace as one page, which opens from disk and needs nothing else."""
