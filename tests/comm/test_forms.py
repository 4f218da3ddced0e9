"""Collectives on tensors of every layout, with parts of every size, compared with plain
indexing."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from ringdp import Communicator
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

LARGE = 40_000  # float64 elements; several slabs


def input_of(rank: int, elements: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Small integers, exact in every dtype and order of additions."""
    g = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randint(-5, 6, (elements,), generator=g).to(dtype)
    return x + 1j * x.flip(0) if dtype.is_complex else x


def with_layout(x: Tensor, form: str) -> Tensor:
    """A tensor with x's elements in row-major order, but another layout."""
    match form:
        case "strided":
            both = torch.stack([x, torch.full_like(x, 3)], 1)
            return beside(both[:, 0], both[:, 1])
        case "stepped" if x.numel() % 2 == 0:
            wide = x.new_full((x.numel(), 4), 3)
            return beside(wide[1::2, 1::2], wide[:, ::2]).copy_(x.view(-1, 2))
        case "transposed" if x.numel() % 2 == 0:
            return x.view(2, -1).t().contiguous().t()
        case "grad" if x.is_floating_point():
            return x.clone().requires_grad_()
        case "grad, transposed" if x.is_floating_point() and x.numel() % 2 == 0:
            return x.view(2, -1).t().clone().requires_grad_().t()
        case "conjugate" if x.is_complex():
            return x.conj().resolve_conj().conj()
        case "negative" if x.dtype == torch.float64:
            return torch.complex(torch.zeros_like(x), -x).conj().imag
        case "scalar" if x.numel() == 1:
            return x.clone().view(())
        case "inference":
            with torch.inference_mode():
                return x.clone()
        case "inference, strided":
            with torch.inference_mode():
                return with_layout(x, "strided")
    return x.clone()


def beside(x: Tensor, others: Tensor) -> Tensor:
    """x, whose storage also holds others, all 3."""
    x.others = others  # type: ignore[attr-defined]
    return x


def elements(x: Tensor) -> Tensor:
    """Its elements in row-major order; asserts that a call changed nothing beside them, and was not
    seen by autograd."""
    assert torch.all(getattr(x, "others", torch.ones(0)) == torch.tensor(3).to(x.dtype))
    assert x.is_leaf or x._is_view()
    return x.detach().reshape(-1).resolve_conj()


FORMS = (
    *("plain", "scalar", "strided", "stepped", "transposed", "grad", "grad, transposed"),
    *("conjugate", "negative", "inference", "inference, strided"),
)
DTYPES = (torch.float64, torch.complex64, torch.bfloat16, torch.int16, torch.bool)


def check_moving(comm: Communicator, seeds: int) -> None:
    n, me = comm.size, comm.rank
    rng = random.Random(n)  # the same on all ranks
    for seed in range(seeds):
        dtype, root = rng.choice(DTYPES), rng.randrange(n)
        into, out_of = rng.choice(FORMS), rng.choice(FORMS)
        algorithm = rng.choice(("direct", "binomial"))
        most = LARGE if seed % 20 == 0 else 7
        table = [[rng.choice((0, 1, rng.randrange(most))) for _ in range(n)] for _ in range(n)]
        sizes = table[0]
        mine = [input_of(r, sizes[r], dtype, seed) for r in range(n)]
        whole = torch.cat(mine)

        def out(count: int, dtype: torch.dtype = dtype, into: str = into) -> Tensor:
            return with_layout(input_of(n, count, dtype, -1), into)

        work, own = [], with_layout(mine[me], out_of)
        work.append((o := out(len(whole)), whole, comm.all_gather_v(o, own, sizes, async_op=True)))
        o = out(len(whole))
        more = {"algorithm": algorithm, "async_op": True}
        w = comm.gather_v(o if me == root else None, own, sizes, root, **more)
        work.append((o if me == root else own, whole if me == root else mine[me], w))
        o = out(sizes[me])
        source = with_layout(whole, out_of)
        w = comm.scatter_v(o, source if me == root else None, sizes, root, **more)
        work += [(o, mine[me], w), (source, whole, w)]
        pairs = [
            [input_of(s * n + d, table[s][d], dtype, seed) for d in range(n)] for s in range(n)
        ]
        received = [pairs[s][me] for s in range(n)]
        o = out(sum(map(len, received)))
        i = with_layout(torch.cat(pairs[me]), out_of)
        w = comm.all_to_all_v(o, i, [len(p) for p in received], table[me], async_op=True)
        work += [(o, torch.cat(received), w), (i, torch.cat(pairs[me]), w)]
        k = rng.randrange(most)
        i = with_layout(input_of(me, k * n, dtype, seed), out_of)
        o = out(k * n)
        w = comm.all_to_all(o, i, async_op=True)
        parts = [input_of(r, k * n, dtype, seed)[me * k : (me + 1) * k] for r in range(n)]
        work.append((o, torch.cat(parts), w))
        i = with_layout(input_of(me, k, dtype, seed), into)
        work.append((i, input_of(root, k, dtype, seed), comm.broadcast(i, root, async_op=True)))
        for output, want, w in work:
            w.wait()
            assert torch.equal(elements(output), want), (seed, dtype)


def check_summing(comm: Communicator, seeds: int) -> None:
    n, me = comm.size, comm.rank
    rng = random.Random(n)
    for seed in range(seeds):
        dtype, root = rng.choice((torch.float64, torch.complex128, torch.int64)), rng.randrange(n)
        into, out_of = rng.choice(FORMS), rng.choice(FORMS)
        algorithm, scale = rng.choice(("direct", "binomial")), rng.choice((None, 0.5, 3))
        if not (dtype.is_floating_point or dtype.is_complex):
            scale = None
        most = LARGE if seed % 20 == 0 else 7
        sizes = [rng.choice((0, 1, rng.randrange(most))) for _ in range(n)]
        whole, begin = sum(sizes), sum(sizes[:me])
        total = sum(input_of(r, whole, dtype, seed) for r in range(n)) * (scale or 1)
        x = with_layout(input_of(me, whole, dtype, seed), into)
        comm.all_reduce(x, scale=scale)
        assert torch.equal(elements(x), total)

        x = with_layout(input_of(me, whole, dtype, seed), into)
        comm.reduce(x, root, scale=scale, algorithm=algorithm)
        want = total if me == root else input_of(me, whole, dtype, seed)
        assert torch.equal(elements(x), want), "unchanged on the other ranks"

        source = with_layout(input_of(me, whole, dtype, seed), out_of)
        o = with_layout(input_of(me, sizes[me], dtype, -1), into)
        comm.reduce_scatter_v(o, source, sizes, scale=scale)
        own = total[begin : begin + sizes[me]]
        assert torch.equal(elements(o), own)
        assert torch.equal(elements(source), input_of(me, whole, dtype, seed))
        source = input_of(me, whole, dtype, seed)
        comm.reduce_scatter_v(source[begin : begin + sizes[me]], source, sizes, scale=scale)
        assert torch.equal(source[begin : begin + sizes[me]], own), "in place"


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("what", [check_moving, check_summing])
def test_every_layout_and_part_size(ranks, n: int, what: Callable[..., None]):
    ranks(n)(what, 60)


def check_inference_mode(comm: Communicator) -> None:
    n, me = comm.size, comm.rank
    with torch.inference_mode():
        mine, some, all_of = torch.full((2 * n,), 2.0 * me), torch.ones(2), torch.ones(2, n).t()
        source = torch.arange(2.0 * n)
        averaged, split, passed = mine.clone(), some.clone(), mine.clone()
        works = [
            comm.all_reduce(averaged, "avg", algorithm="ring", async_op=True),
            comm.reduce_scatter(split, mine, "avg", algorithm="ring", async_op=True),
            comm.all_gather(all_of, split.clone().fill_(me), async_op=True),
            comm.scatter(some, source, algorithm="binomial", async_op=True),
            comm.all_to_all_v(passed, mine, [2] * n, [2] * n, async_op=True),
        ]
    for work in works:
        work.wait()
    assert torch.all(averaged == n - 1)
    assert torch.all(split == n - 1)
    each = torch.arange(float(n)).repeat_interleave(2)
    assert torch.equal(all_of.reshape(-1), each)
    assert torch.equal(some, torch.tensor([2.0 * me, 2 * me + 1]))
    assert torch.equal(passed, 2 * each)


def test_works_begun_in_inference_mode_can_be_waited_for_outside(ranks):
    ranks(2)(check_inference_mode)


@on_ranks(3)
def test_every_op_of_every_kind_of_dtype(comm: Communicator) -> None:
    """Three ranks with eight elements: every combination of bits."""
    bits = torch.tensor([(place >> r) & 1 for r in range(3) for place in range(8)]).view(3, 8)
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.float32):
        for op, want in {
            "band": bits.amin(0),
            "bor": bits.amax(0),
            "bxor": bits.sum(0) % 2,
            "min": bits.amin(0),
            "max": bits.amax(0),
            "prod": bits.amin(0),
            "sum": bits.amax(0) if dtype == torch.bool else bits.sum(0),
        }.items():
            if dtype.is_floating_point and op.startswith("b"):
                continue
            x = bits[comm.rank].to(dtype, copy=True)
            comm.all_reduce(x, op)
            assert torch.equal(x, want.to(dtype)), (dtype, op)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(4)
def test_a_reduce_to_any_root_has_the_bits_of_all_reduce(
    comm: Communicator, dtype: torch.dtype
) -> list[float]:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(comm.rank)).to(dtype)
    reduced = [x.clone() for _ in range(comm.size)]
    for root, y in enumerate(reduced):
        comm.reduce(y, root)
    comm.all_reduce(x)
    assert torch.equal(reduced[comm.rank], x)
    return x.tolist()


@pytest.mark.parametrize("n", [2, 4])
@on_ranks()
def test_input_and_output_may_overlap(comm: Communicator) -> None:
    """The input is any part of the output, or begins with the rank's own but has another stride."""
    n, me = comm.size, comm.rank
    for shift, (gather, scatter) in product(
        range(3 * n - 2), (("direct",) * 2, ("ring", "binomial"))
    ):
        out = torch.arange(3 * n) + 100 * me
        comm.all_gather(out, out[shift : shift + 3], algorithm=gather)
        want = torch.cat([torch.arange(shift, shift + 3) + 100 * r for r in range(n)])
        assert torch.equal(out, want)
        out = torch.arange(3 * n) + 100 * me
        comm.scatter(out[shift : shift + 3], out, root=1, algorithm=scatter)
        want = torch.arange(3 * n) + 100 * me
        want[shift : shift + 3] = torch.arange(3 * me, 3 * me + 3) + 100
        assert torch.equal(out, want)
    given = torch.arange(4 * n) + 100 * torch.arange(n)[:, None]  # [ranks, elements]
    parts = [given[r].split(4)[r] if r else given[0, ::2][:4] for r in range(n)]
    for algorithm, gathers in product(("direct", "ring"), (False, True)):
        whole = given[me].clone()
        part = whole.split(4)[me] if me else whole[::2][:4]
        if gathers:
            comm.all_gather(whole, part, algorithm=algorithm)
            assert torch.equal(whole, torch.cat(parts))
        else:
            comm.reduce_scatter(part, whole, algorithm=algorithm)
            assert torch.equal(part, given.sum(0).split(4)[me])
    out = torch.arange(2 * n) + 100 * me
    comm.all_to_all(out, out)
    assert torch.equal(
        out.view(n, 2), torch.stack([torch.arange(2) + 2 * me + 100 * r for r in range(n)])
    )


@on_ranks(2)
def test_a_collective_breaks_a_torch_compile_graph(comm: Communicator) -> None:
    def step(x: Tensor) -> Tensor:
        y = x * 2
        comm.all_reduce(y)
        work = comm.broadcast(y, 1, async_op=True)
        z = y + 1
        work.wait()
        return z + y

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    fast = torch.compile(step, backend=keep)
    for _ in range(3):  # the first call, a repeated one, and compiled code
        assert torch.equal(fast(torch.ones(3)), torch.full((3,), 4.0 * comm.size + 1))
    assert len(graphs) == 3  # y, z and z + y
