"""`squared_norm` with its loads some chunks ahead: a trial, which `bench.shapes` times.

The kernel of `ringdp.kernels.norm` has few loads in flight, as the compiler sees fit. Here they are
asynchronous copies to shared memory (`cp.async`), of the next STAGES - 1 chunks, whose rows of the
table are loaded another chunk ahead. Aligned chunks of full length come first in the table, so that
their loop has no branch, which would rule this out.
"""
# ruff: noqa: N803  a Triton constant is upper case

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringdp.kernels.jit import jit
from ringdp.kernels.spans import tables

if TYPE_CHECKING:
    import triton.language as tl

PROGRAMS = 792
THREADS = 256
BLOCK = 4096  # elements per chunk
STAGES = 3


@jit(num_warps=THREADS // 32, unspecialized=("total",))
def pipelined_norm_kernel(
    chunks: tl.tensor,  # as in squared_norm_kernel, as the rest
    whole: tl.tensor,  # chunks that are aligned and of BLOCK elements: the first ones
    count: tl.tensor,
    scratch: tl.tensor,
    total: tl.tensor,
    SOURCE: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    MOST: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, LANES)
    sums = tl.full((LANES,), 0, tl.float64)
    first_row = program.to(tl.int64)
    for row in tl.range(first_row, tl.cast(whole, tl.int64), programs, num_stages=STAGES):
        source = tl.multiple_of(tl.load(chunks + row * 3).to(tl.pointer_type(SOURCE)), 16)
        for first in tl.static_range(0, BLOCK, LANES):
            x = tl.load(source + (first + lane)).to(tl.float64)
            sums += x * x
    for row in range(first_row + whole, tl.cast(count, tl.int64), programs):
        source = tl.load(chunks + row * 3).to(tl.pointer_type(SOURCE))
        elems = tl.load(chunks + row * 3 + 2).to(tl.int32)
        for first in range(0, elems, LANES):
            inside = first + lane < elems
            x = tl.load(source + first + lane, mask=inside, other=0).to(tl.float64)
            sums += x * x
    place = (scratch + program).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(place, tl.sum(sums, 0).to(tl.int64, bitcast=True), sem="relaxed")
    if program == programs - 1:
        every = tl.arange(0, MOST)
        inside = every <= program
        found = tl.full((), float("-inf"), tl.float64)
        while found == float("-inf"):  # the trial has no nan and inf
            found = tl.sum(tl.load(scratch + every, mask=inside, other=0, volatile=True), 0)
        tl.store(total, found)
        tl.store(scratch + every, float("-inf"), mask=inside)


class PipelinedNorm:
    """The squared norm of one float tensor, again and again."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        (table,) = tables([x], x.device, block=lambda _: BLOCK).values()
        full = (table[:, 2] == BLOCK) & (table[:, 0] % 16 == 0)
        self.chunks = torch.cat([table[full], table[~full]])
        self.whole = int(full.sum())
        self.scratch = torch.full((PROGRAMS,), -torch.inf, dtype=torch.float64, device=x.device)
        self.total = torch.empty((), dtype=torch.float64, device=x.device)

    def __call__(self) -> Tensor:
        lanes = THREADS * 16 // self.x.dtype.itemsize
        assert BLOCK % lanes == 0
        pipelined_norm_kernel.launch(
            min(len(self.chunks), PROGRAMS),
            self.chunks,
            self.whole,
            len(self.chunks),
            self.scratch,
            self.total,
            SOURCE=self.x.dtype,
            BLOCK=BLOCK,
            LANES=lanes,
            MOST=1 << (PROGRAMS - 1).bit_length(),
            STAGES=STAGES,
        )
        return self.total
