"""What only a GPU shows for several kernels: lengths beyond 2^31, and CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from ringdp.kernels import flatten, fold, stochastic_round, unscale

pytestmark = pytest.mark.gpu
LONG = (1 << 31) + 4096 + 17  # two launches; the last element's index has 32 bits


@pytest.fixture(autouse=True)
def free_cached_memory() -> None:
    """Each test takes gigabytes of the GPU's memory, and other tests run at the same time."""
    torch.cuda.empty_cache()


def test_fold_past_32_bits() -> None:
    parts = torch.randint(-128, 128, (2, LONG), dtype=torch.int8, device="cuda")
    want = parts[0] + parts[1]
    fold(parts, parts[1])
    assert torch.equal(parts[1], want)


def test_unscale_past_32_bits() -> None:
    x = torch.randint(-128, 128, (LONG,), dtype=torch.int8, device="cuda").bfloat16()
    found = torch.zeros(1, device="cuda")
    want = x * 0.5
    unscale(x, x, found, scale=0.5)
    assert torch.equal(x, want)
    assert found.item() == 0
    x[-1] = torch.inf
    unscale(x, x, found, scale=0.5)
    assert found.item() == 1


def test_stochastic_round_past_32_bits() -> None:
    """The last elements are those of a call with only these and their offset."""
    x = torch.full((LONG,), 1 + 2.0**-8, device="cuda")
    out = torch.empty(LONG, dtype=torch.bfloat16, device="cuda")
    stochastic_round(x, out, seed=1, offset=1 << 31)
    last = torch.empty(5000, dtype=torch.bfloat16)
    stochastic_round(x[-5000:].cpu(), last, seed=1, offset=(1 << 31) + LONG - 5000)
    assert torch.equal(out[-5000:].cpu(), last)


def test_flatten_past_32_bits() -> None:
    out = torch.full((LONG,), torch.nan, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(5000, device="cuda")
    flatten([x], out, scale=2.0, offsets=[LONG - 5001])
    assert torch.equal(out[-5001:-1], (x * 2).bfloat16())
    assert not out[:-5001].any()
    assert out[-1] == 0


def test_a_captured_graph_can_be_replayed() -> None:
    parts, out = torch.ones(3, 5000, device="cuda"), torch.zeros(5000, device="cuda")
    found = torch.zeros(1, device="cuda")

    def call() -> None:
        fold(parts, out)
        unscale(out, out, found, scale=0.5)

    call()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for value in (1.0, 4.0, torch.inf):
        parts.fill_(value)
        graph.replay()
        assert (out == value * 1.5).all()
        assert found.item() == (value == torch.inf)
