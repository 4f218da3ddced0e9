"""All ranks of a collective on one communicator of one rank, which sends to itself.

So one device runs whole collectives, with its own transfers and folds: the host, or a GPU.
"""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import Tensor

from ringdp.schedule import fuse, project, schedule
from ringdp.transport.bounds import chunk_bounds
from ringdp.transport.device.streams import streams
from ringdp.transport.nccl.execute import Nccl, execute
from ringdp.transport.nccl.library import binding
from ringdp.transport.nccl.plan import plan
from ringdp.transport.nccl.tiles import Tiles, staging_shape
from ringdp.transport.simulator import simulate
from tests.transport.nccl.faults import only_with_host_nccl

CASES = [
    ("all_reduce", "ring"),
    ("all_reduce", "direct"),
    ("all_reduce", "tree"),
    ("reduce_scatter", "halving"),
    ("all_gather", "ring"),
    ("all_to_all", "pairwise"),
]


def run(nccl: Nccl, collective: str, name: str, inputs: list[Tensor], slab: int) -> list[Tensor]:
    """The ranks' buffers after the collective, on the CPU."""
    made = schedule(collective, name, len(inputs))
    tiles = {}
    for rank, x in enumerate(inputs):
        program = project(made, rank)
        own, bounds = plan(program), chunk_bounds(x.numel(), program)
        staging = torch.empty(
            prod(staging_shape(own, bounds, slab)), dtype=x.dtype, device=nccl.streams.device
        )
        tiles[rank] = Tiles(own, x.to(nccl.streams.device, copy=True), bounds, staging, slab)
    arrival = nccl.streams.arrival()
    with nccl.streams.current():
        nccl.streams.follow(arrival)
        execute(nccl, tiles, "sum", peer=lambda _: 0)
        nccl.streams.drain()
    return [t._buffer.cpu() for t in tiles.values()]


def check(nccl: Nccl, n: int, elements: int, slab: int, dtype: torch.dtype) -> None:
    for collective, name in CASES:
        g = torch.Generator().manual_seed(n)
        inputs = [torch.randn(elements * n, generator=g).to(dtype) for _ in range(n)]
        expected = [x.clone() for x in inputs]
        made = schedule(collective, name, n)
        simulate([fuse(project(made, r)) for r in range(n)], expected, depth=64)
        for found, expected_buffer in zip(
            run(nccl, collective, name, inputs, slab), expected, strict=True
        ):
            assert torch.equal(found, expected_buffer), (collective, name)


def alone(device: torch.device, *, host: bool) -> Nccl:
    nccl = binding(host=host)
    with streams(device).current():
        return Nccl(nccl, nccl.NcclCommunicator(1, nccl.get_unique_id(), 0), streams(device))


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_virtual_ranks_on_the_host_give_the_simulators_bits(n: int, dtype: torch.dtype):
    only_with_host_nccl()
    check(alone(torch.device("cpu"), host=True), n, 1003, 160, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_virtual_ranks_on_a_gpu_give_the_simulators_bits(n: int, dtype: torch.dtype):
    check(alone(torch.device("cuda", 0), host=False), n, 30_011, 8_192, dtype)
