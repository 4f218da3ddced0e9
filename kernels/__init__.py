"""Triton kernels, each beside its torch reference, which is also the path for CPU tensors.

`flatten` fills a gradient bucket, `fold` sums what the ranks sent, `adamw` steps a flat shard. All
work on the tensors they are given and pick their path by device. Importing this package imports
torch only; Triton is imported by the first launch on a GPU.
"""

from .adamw import adamw
from .flatten import flatten
from .fold import fold

__all__ = ["adamw", "flatten", "fold"]
