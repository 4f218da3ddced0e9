"""The kernels on CPU tensors, in C++: csrc/kernels.hpp.

Each takes plain tensors: of torch's own class, contiguous, in memory. It returns False or None, and
has done nothing, if one is not plain or they do not fit together. A launcher then checks what is
wrong, or calls the reference.
"""

from __future__ import annotations

from contextlib import suppress
from ctypes import CDLL, c_void_p, cast
from typing import Any

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


def _address(function: Any) -> int:
    return cast(function, c_void_p).value or 0


# A library's symbols include those of the libraries that it is linked to.
_torch = CDLL(torch._C.__file__)
with suppress(AttributeError):  # of a torch without OpenMP
    _core.use_openmp(_address(_torch.GOMP_parallel), _address(_torch.omp_get_thread_num))
