"""Triton kernels, each beside its torch reference, which is also the path for CPU tensors.

`flatten` fills a gradient bucket and `unflatten` empties it, `fold` sums what the ranks sent,
`unscale` averages and looks for inf and nan, `squared_norm` is for clipping, `adamw` steps a flat
shard, `stochastic_round` makes bfloat16 of float32 without bias. All work on the tensors they are
given and pick their path by device. ringdp itself calls `flatten` when it shards a model, `adamw`
in its optimizer and `fold` in the NCCL transport; the others are for users, and in
`ringdp bench kernels`. Importing this package imports torch only; Triton is imported by the first
launch on a GPU.

In the file of each are `<name>_torch` and `<name>_triton`, which take what `<name>` has checked.
With TRITON_INTERPRET=1 in the environment the latter runs on CPU tensors. Triton's interpreter
truncates what it makes bfloat16; in the tests it rounds, as a GPU does (tests/kernels/conftest.py).
"""

from .adamw import adamw
from .flatten import flatten
from .fold import fold
from .norm import squared_norm
from .stochastic import stochastic_round
from .unflatten import unflatten
from .unscale import unscale

__all__ = [
    "adamw",
    "flatten",
    "fold",
    "squared_norm",
    "stochastic_round",
    "unflatten",
    "unscale",
]
