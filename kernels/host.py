"""The kernels on CPU tensors, in C++: csrc/kernels.hpp.

It reads tensors that are plain: of torch's own class, contiguous, in memory. Others are torch's.
"""

from __future__ import annotations

from contextlib import suppress
from ctypes import CDLL, c_void_p, cast

import torch
from torch import Tensor

from ringdp import _core

HOST = _core.Kernels(Tensor.__dlpack_c_exchange_api__, Tensor, torch.nn.Parameter)
# A library's symbols include those of the libraries that it is linked to.
torchs = CDLL(torch._C.__file__)
with suppress(AttributeError):  # of a torch without OpenMP
    found = (cast(f, c_void_p).value for f in (torchs.GOMP_parallel, torchs.omp_get_thread_num))
    _core.use_openmp(*found)
