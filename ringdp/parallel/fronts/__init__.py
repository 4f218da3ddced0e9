"""Other libraries' interfaces over the same engine: they translate arguments and call `shard`.

An argument that asks for something the engine does not do is an error, never ignored.
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
