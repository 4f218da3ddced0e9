"""DistributedDataParallel has the bits of torch's over gloo in every gradient, parameter and
buffer, at 2 ranks, where both add in the same order."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import Communicator
from tests.equal import equal
from tests.parallel.ddp.cases import CASES, TORCHS, WIDTH, backward, gloo, train
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_bits_equal_torchs(comm: Communicator, name: str) -> None:
    gloo()
    gradients, states = train(CASES[name], ringdp.DistributedDataParallel, comm.rank)
    theirs, expected = train(CASES[name], nn.parallel.DistributedDataParallel, comm.rank)
    for i, (mine, other) in enumerate(zip(gradients, theirs, strict=True)):
        assert (mine is None) == (other is None), f"gradient {i}"
        if mine is not None and other is not None:
            assert mine.dtype == other.dtype
            assert torch.equal(mine, other), f"gradient {i}"
            assert mine.stride() == other.stride(), f"gradient {i}"
    for mine, other in zip(states, expected, strict=True):
        assert torch.equal(mine, other)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (WIDTH, *[400] * 6)  # 0.6 MiB per layer; torch splits no graph below 1 MiB
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@on_ranks(2)
def test_a_compiled_wrapper_is_split_at_bucket_boundaries(comm: Communicator) -> None:
    """It is split into as many graphs as torch's."""
    gloo()
    found, counts = [], []
    for wrap in (ringdp.DistributedDataParallel, TORCHS):
        graphs: list[Any] = []

        def keep(graph: Any, _: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        torch.manual_seed(0)
        net = torch.compile(wrap(Deep(), bucket_cap_mb=1), backend=keep)
        found.append([g for step in range(3) for g in backward(net, step, comm.rank)])
        counts.append(len(graphs))
        assert TORCHS._get_active_ddp_module() is None
    assert equal(*found)
    assert counts[0] == counts[1] > 1, counts
