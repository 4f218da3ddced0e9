"""The squared norm of many tensors: each rank's contribution to clipping by the global norm.

    squared_norm = Σ_i Σ_e float64(x_i[e])²

A float32 has 24 bits, so its square is exact in float64, and none overflows. The only rounding is
that of the sum, relatively at most (elements − 1)·2⁻⁵³ (Higham 2002, §4.2; all terms are positive).
The sum's last bits depend on how tensors are cut among ranks; those of the float32 norm hardly ever
do. The order is fixed for given lengths, and on a GPU alignments to 16 bytes, so a repetition has
the same bits. The global norm is the root of the sum of all ranks' results.
Must move elements · bytes of x. Leaves out: other norms, and CUDA graph capture, as `flatten` does.
Reference: `squared_norm_torch`.

Note [the sum of the sums]
  On an H200, 64 MiB of float32 take 20.8 µs, and a copy that moves as much 18.3. A kernel that only
  reads them takes 19.0, with each program's own sum of squares 19.4, so the sum of the programs'
  sums takes over 1 µs: about two trips to the L2 cache. A second launch for it takes 22.5 in all,
  and a counter that tells the last program to arrive 22.0. With thousands of programs, one for each
  chunk or two, the last one waits for so many sums that it takes 22 to 24. Of other numbers of
  programs and threads, and lengths of chunks, none was faster for float32 and bfloat16 together.
"""
# ruff: noqa: N803  a Triton constant is upper case

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import host
from .address import check_storage
from .jit import jit, raw_stream
from .precision import FLOATS
from .repeats import Repeats
from .spans import tables

if TYPE_CHECKING:
    import triton.language as tl

# At most six for each of an H200's 132 multiprocessors. With up to 40 registers a thread they all
# run at once, so none starts late [Triton 3.6 to 3.9 use 30 to 40 on sm_90, but 3.9 uses 44 for
# 16-bit floats; on sm_80 32 to 48]. See Note [the sum of the sums].
PROGRAMS = 792
THREADS = 256
BLOCK = 8192  # elements per chunk
CPU = torch.device("cpu")
_repeats = Repeats()


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return float64[] on the tensors' device (the CPU if there are none).

    It is inf or nan if a tensor contains one. The tensors may have any shape, strides and float
    dtype. Raises ValueError on another dtype, and if they are on several devices.
    """
    if tensors and tensors[0].is_cuda:
        return squared_norm_triton(tensors)
    threads = torch.get_num_threads()
    total = host.squared_norm(tensors, threads)
    if total is None:
        check(tensors)
        check_storage(*tensors)
        tensors = [x.contiguous() for x in tensors]
        total = host.squared_norm(tensors, threads)
    if total is None:
        return squared_norm_torch(tensors)
    return torch.scalar_tensor(total, dtype=torch.float64, device=CPU)


def check(tensors: Sequence[Tensor]) -> None:
    devices = {x.device for x in tensors}
    if len(devices) > 1:
        raise ValueError(f"tensors must be on one device, not on {sorted(map(str, devices))}")
    for i, x in enumerate(tensors):
        if x.dtype not in FLOATS:
            raise ValueError(f"tensor {i} is {x.dtype}; supported are {FLOATS}")


@torch.no_grad()
def squared_norm_torch(tensors: Sequence[Tensor]) -> Tensor:
    check(tensors)
    sums = [x.double().square().sum() for x in tensors]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64, device="cpu")


@jit(num_warps=THREADS // 32, unspecialized=("total",))
def squared_norm_kernel(
    chunks: tl.tensor,  # int64[count, 3], rows are Spans of at most BLOCK elements
    count: tl.tensor,
    scratch: tl.tensor,  # float64[PROGRAMS]: their sums; before that -inf, never a sum of squares
    total: tl.tensor,  # float64[]
    SOURCE: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,  # sums of a program, which are added up once, after its last chunk
    MOST: tl.constexpr,  # at least the number of programs, and a power of two
) -> None:
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, LANES)
    sums = tl.full((LANES,), 0, tl.float64)
    # At any time the programs read adjacent chunks. Each with its own adjacent ones, together all
    # over the memory, they take up to 3 % longer [measured: H200, 64 and 256 MiB].
    for row in range(program.to(tl.int64), tl.cast(count, tl.int64), programs):
        address = tl.load(chunks + row * 3)
        elems = tl.load(chunks + row * 3 + 2).to(tl.int32)
        source = address.to(tl.pointer_type(SOURCE))
        if (elems == BLOCK) & ((address & 15) == 0):  # 16-byte accesses: known alignment, no mask
            aligned = tl.multiple_of(source, 16)
            for first in tl.static_range(0, BLOCK, LANES):
                x = tl.load(aligned + (first + lane)).to(tl.float64)
                sums += x * x
        else:
            for first in range(0, elems, LANES):
                inside = first + lane < elems
                x = tl.load(source + first + lane, mask=inside, other=0).to(tl.float64)
                sums += x * x
    # A sum is its own flag, so no program waits for a fence or a counter. The last program starts
    # after all others; it waits for their sums and adds in a fixed order (as in Merrill & Garland's
    # scan, 2016).
    place = (scratch + program).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(place, tl.sum(sums, 0).to(tl.int64, bitcast=True), sem="relaxed")
    if program == programs - 1:
        every = tl.arange(0, MOST)
        inside = every <= program
        # Their sum also tells whether one is missing, which saves a second reduction. It is nan if
        # a part is, or if one is inf and another missing.
        parts = tl.full((MOST,), float("-inf"), tl.float64)
        found = tl.full((), float("-inf"), tl.float64)
        while found == float("-inf"):
            parts = tl.load(scratch + every, mask=inside, other=0, volatile=True)
            found = tl.sum(parts, 0)
        if found != found:
            while tl.sum((parts == float("-inf")).to(tl.int32), 0) > 0:
                parts = tl.load(scratch + every, mask=inside, other=0, volatile=True)
            found = tl.sum(parts, 0)
        tl.store(total, found)
        tl.store(scratch + every, float("-inf"), mask=inside)  # for the next launch


@cache
def _scratch(device: torch.device, stream: int) -> Tensor:
    """Launches on one stream take turns, so they share it."""
    return torch.full((PROGRAMS,), -torch.inf, dtype=torch.float64, device=device)


def squared_norm_triton(tensors: Sequence[Tensor]) -> Tensor:
    tensors = list(tensors)  # once, as it may make them
    device = tensors[0].device if tensors else torch.device("cpu")
    total = torch.empty((), dtype=torch.float64, device=device)
    if _repeats.again(tensors, None, (total.data_ptr(),)):
        return total
    check(tensors)
    if not all(map(Tensor.is_contiguous, tensors)):  # repeated launches were checked at first
        return squared_norm_triton([x.contiguous() for x in tensors])
    alike = [[x for x in tensors if x.dtype == dtype and x.numel()] for dtype in FLOATS]
    parts = list(filter(None, alike))
    if len(parts) != 1:
        return sum(map(squared_norm_triton, parts), total.zero_())
    (chunks,) = tables(parts[0], device, block=lambda _: BLOCK).values()
    launch = squared_norm_kernel.launch(
        min(len(chunks), PROGRAMS),
        chunks,
        len(chunks),
        _scratch(device, raw_stream(total.get_device())),
        total,
        SOURCE=parts[0][0].dtype,
        BLOCK=BLOCK,
        LANES=THREADS * 16 // parts[0][0].dtype.itemsize,  # an access of 16 bytes for each thread
        MOST=1 << (PROGRAMS - 1).bit_length(),
    )
    _repeats.keep(tensors, None, [launch], [chunks])
    return total
