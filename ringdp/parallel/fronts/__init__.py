"""The names that people know from elsewhere, over the same engine: arguments in, `shard` out.

What one of them can ask for and the engine does not do is an error that says so, never ignored.
"""

from ringdp.parallel.fronts.deepspeed import initialize
from ringdp.parallel.fronts.fsdp import FullyShardedDataParallel
from ringdp.parallel.fronts.fsdp2 import fully_shard
from ringdp.parallel.fronts.zero import ZeroRedundancyOptimizer

__all__ = [
    "FullyShardedDataParallel",
    "ZeroRedundancyOptimizer",
    "fully_shard",
    "initialize",
]
