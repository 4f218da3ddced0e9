"""The kernels on CPU tensors, in C++: csrc/kernels.hpp.

Each takes plain tensors: of torch's own class, contiguous, in memory. It returns False or None, and
has done nothing, if one is not plain or they do not fit together. A launcher then checks what is
wrong, or calls the reference.
"""

from __future__ import annotations

from contextlib import suppress
from ctypes import CDLL, c_void_p, cast

import torch
from torch import Tensor

from ringdp import _core

_kernels = _core.Kernels(Tensor.__dlpack_c_exchange_api__, Tensor, torch.nn.Parameter)
# torch.compile calls a method of such an object without the object, but these with it.
adamw = _kernels.adamw
flatten = _kernels.flatten
fold = _kernels.fold
squared_norm = _kernels.squared_norm
stochastic_round = _kernels.stochastic_round
unflatten = _kernels.unflatten
unscale = _kernels.unscale


def _openmp() -> tuple[int, int]:
    """Addresses in the OpenMP library that torch calls: a preloaded one, or that which it is linked
    to. (0, 0) if torch has none."""
    for library in (CDLL(None), CDLL(torch._C.__file__)):
        with suppress(AttributeError):
            functions = library.GOMP_parallel, library.omp_get_thread_num
            parallel, thread = (cast(f, c_void_p).value or 0 for f in functions)
            return parallel, thread
    return 0, 0


_core.use_openmp(*_openmp())
