"""Triton kernels, each beside its torch reference; CPU tensors take the same in C++.

`flatten` fills a gradient bucket and `unflatten` empties it, `fold` sums the ranks' parts,
`unscale` averages and checks for inf and nan, `squared_norm` is for clipping, `adamw` steps a flat
shard, and `stochastic_round` rounds float32 to bfloat16 without bias. Each picks its path by the
tensors' device. ringdp itself calls `flatten` when it shards a model, `squared_norm` when it clips,
`unscale` in its loss scaler, `adamw` in its optimizer and `fold` in the NCCL transport; `unflatten`
and `stochastic_round` are for users, and for `ringdp bench kernels`. Importing this package imports
torch only; the first launch on a GPU imports Triton.

Each file has `<name>_torch` and `<name>_triton`, which take arguments that `<name>` has checked.
The first is the formula in torch's operations, for tests and for tensors that C++ cannot read.
With TRITON_INTERPRET=1 in the environment the latter runs on CPU tensors. Triton's interpreter
truncates to bfloat16; in the tests it rounds, as a GPU does (tests/kernels/conftest.py).
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
