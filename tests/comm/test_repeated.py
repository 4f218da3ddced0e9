"""A repeated call stays in C++, and gives the results, records and errors of a first call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import permutations, product

import pytest
import torch
from torch import Tensor

from ringdp import Communicator, Work
from ringdp.comm.call import named, place
from ringdp.comm.job import CallSpec, Job
from ringdp.errors import UsageError
from ringdp.schedule import Schedule
from tests.equal import equal
from tests.ranks import on_ranks
from tests.transport.test_conformance import star

pytestmark = pytest.mark.process

# (communicator, whole tensor, a part of it) -> work
Call = Callable[[Communicator, Tensor, Tensor], Work]


class Stars:
    def one(self, n: int) -> Schedule:
        return star(n)

    __call__ = one


STARS = Stars()


def own_part(comm: Communicator, whole: Tensor) -> Tensor:
    """This rank's part of the whole."""
    return whole.view(comm.size, -1)[comm.rank]


def uneven(comm: Communicator) -> list[int]:
    """Sizes of parts: 1 for rank 0, 2 for rank 1, ..."""
    return [*range(1, comm.size + 1)]


def pieces(comm: Communicator, whole: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """As much of both tensors as these parts need."""
    return whole[: sum(uneven(comm))], part[: comm.rank + 1]


REPEATED: dict[str, Call] = {
    "all_reduce": lambda c, x, _: c.all_reduce(x),
    "op": lambda c, x, _: c.all_reduce(x, "max"),
    "op by name": lambda c, x, _: c.all_reduce(x, op="max"),
    "average": lambda c, x, _: c.all_reduce(x, "avg"),
    "tag": lambda c, x, _: c.all_reduce(x, tag=3),
    "defaults": lambda c, x, _: c.all_reduce(x, "sum", scale=None, async_op=False),
    "async": lambda c, x, _: c.all_reduce(x, "max", async_op=True, tag=2),
    "reduce_scatter, async": lambda c, x, p: c.reduce_scatter(p, x, async_op=True),
    "all_gather, async": lambda c, x, p: c.all_gather(x, p, async_op=True),
    "unbound": lambda c, x, _: Communicator.all_reduce(c, x),
    "barrier": lambda c, x, _: c.barrier(),  # type: ignore[func-returns-value]
    "reduce_scatter": lambda c, x, p: c.reduce_scatter(p, x),
    "reduce_scatter, op": lambda c, x, p: c.reduce_scatter(p, x, "min", tag=1),
    "all_gather": lambda c, x, p: c.all_gather(x, p),
    "broadcast": lambda c, x, _: c.broadcast(x),
    "broadcast, root": lambda c, x, _: c.broadcast(x, 1),
    "broadcast, root by name": lambda c, x, _: c.broadcast(x, root=1, async_op=True),
    "broadcast by a program": lambda c, x, _: c.broadcast(x, 1, algorithm="ring"),
    "reduce": lambda c, x, _: c.reduce(x, 1, "max"),
    "reduce, op by name": lambda c, x, _: c.reduce(x, op="max"),
    "gather": lambda c, x, p: c.gather(x if c.rank == 1 else None, p, 1),
    "gather, an output nowhere looked at": lambda c, x, p: c.gather(x, p),
    "scatter": lambda c, x, p: c.scatter(p, x if c.rank == 1 else None, 1),
    "all_to_all": lambda c, x, p: c.all_to_all(x, torch.empty_like(x)),
    "algorithm": lambda c, x, _: c.all_reduce(x, algorithm="ring"),
    "own algorithm": lambda c, x, _: c.all_reduce(x, algorithm=star),
    "some string": lambda c, x, _: c.all_reduce(x, algorithm="".join(("r", "ing"))),
    "the default's name": lambda c, x, _: c.all_reduce(x, algorithm="direct"),
    "algorithm, async": lambda c, x, _: c.all_reduce(x, "max", algorithm="ring", async_op=True),
    "reduce_scatter by a program": lambda c, x, _: c.reduce_scatter(
        own_part(c, x), x, algorithm="ring"
    ),
    "apart": lambda c, x, p: c.reduce_scatter(p, x, algorithm="ring"),
    "apart, async": lambda c, x, p: c.reduce_scatter(p, x, algorithm="ring", async_op=True),
    "all_gather apart": lambda c, x, p: c.all_gather(x, p, algorithm="ring"),
    "all_to_all by a program": lambda c, x, _: c.all_to_all(
        torch.empty_like(x), x, algorithm="pairwise"
    ),
    "all_gather by a program": lambda c, x, _: c.all_gather(x, own_part(c, x), algorithm="ring"),
    "average by a program": lambda c, x, _: c.all_reduce(x, "avg", algorithm="ring"),
    "average apart, async": lambda c, x, p: c.reduce_scatter(
        p, x, "avg", algorithm="ring", async_op=True
    ),
    "gather by a program": lambda c, x, p: c.gather(x, p, algorithm="binomial"),
    "scatter by a program": lambda c, x, p: c.scatter(p, x, c.size - 1, algorithm="binomial"),
    "reduce_scatter_v": lambda c, x, p: c.reduce_scatter_v(
        *pieces(c, x, p)[::-1], uneven(c), "max"
    ),
    "all_gather_v": lambda c, x, p: c.all_gather_v(*pieces(c, x, p), tuple(uneven(c))),
    "all_gather_v, async": lambda c, x, p: c.all_gather_v(
        *pieces(c, x, p), uneven(c), async_op=True
    ),
    "gather_v": lambda c, x, p: c.gather_v(*pieces(c, x, p), uneven(c), 1),
    "scatter_v": lambda c, x, p: c.scatter_v(*pieces(c, x, p)[::-1], uneven(c), root=1),
    "all_to_all_v": lambda c, x, _: c.all_to_all_v(
        torch.empty(c.size * (c.rank + 1)),
        x[: sum(uneven(c))],
        [c.rank + 1] * c.size,
        uneven(c),
    ),
    "a reduce that would change": lambda c, x, _: c.reduce(x, 1, "avg", algorithm="binomial"),
}
OTHERS: dict[str, Call] = {
    "sizes by name": lambda c, x, p: c.all_gather_v(*pieces(c, x, p), sizes=uneven(c)),
    "uneven parts by a program": lambda c, x, p: c.all_gather_v(
        *pieces(c, x, p), uneven(c), algorithm="ring"
    ),
    "tensor by name": lambda c, x, _: c.all_reduce(tensor=x),
    "scale": lambda c, x, _: c.all_reduce(x, scale=2.0),
    "not flat": lambda c, x, _: c.all_reduce(x.view(-1, 2).t()),
    "all_to_all in place": lambda c, x, _: c.all_to_all(x, x),
    "a bound method": lambda c, x, _: c.all_reduce(x, algorithm=STARS.one),
    "an object that may change": lambda c, x, _: c.all_reduce(x, algorithm=STARS),
}


def issued_by_python(comm: Communicator, call: Callable[[], object]) -> int:
    """How many of the calls are issued by Python."""
    seen: list[Job] = []
    issue = comm._issue

    def record(job: Job, how: CallSpec) -> Work:
        seen.append(job)
        return issue(job, how)

    comm._issue = record  # type: ignore[method-assign]
    try:
        call()
    finally:
        del comm._issue
    return len(seen)


@pytest.mark.parametrize("n", [2, 4])
@on_ranks()
def test_repeated_calls_are_not_issued_by_python(comm: Communicator) -> None:
    x, part = torch.ones(4 * comm.size), torch.ones(4)
    for times, calls in ((0, REPEATED), (1, OTHERS)):
        for name, call in calls.items():
            call(comm, x, part)
            before = comm.issued
            assert issued_by_python(comm, lambda c=call: c(comm, x, part)) == times, name  # type: ignore[misc]
            assert comm.issued == before + 1, name
            comm.barrier()


@pytest.mark.parametrize("each", [0, 4, 5000, 70_000])
@pytest.mark.parametrize("n", [2, 4])
@on_ranks()
def test_repeated_calls_of_each_algorithm_have_the_same_bits(comm: Communicator, each: int) -> None:
    """Repeatedly, in different forms; the algorithms differ in rounding."""
    xs = torch.randn(3, each * comm.size, generator=torch.Generator().manual_seed(comm.rank))
    first: dict[object, list[Tensor]] = {}
    for later in (False, False, True, True):
        for algorithm in ("ring", "direct", star, "halving"):
            for x, without_overlap in zip(xs, (True, False, True), strict=True):
                by = "ring" if algorithm is star else algorithm
                whole = x.clone()
                part = torch.empty(each) if without_overlap else own_part(comm, whole)
                comm.reduce_scatter(part, whole, algorithm=by, async_op=later).wait()
                assert not without_overlap or torch.equal(whole, x)
                sums, gathered, turned = x.clone(), torch.empty_like(x), torch.empty_like(x)
                comm.all_reduce(sums, algorithm=algorithm, async_op=later).wait()
                comm.all_gather(gathered, part, algorithm=by, async_op=later).wait()
                comm.all_to_all(turned, x, algorithm="pairwise", async_op=later).wait()
                found = [part.clone(), sums, gathered, turned]
                before = first.setdefault((algorithm, x.data_ptr()), found)
                assert equal(found, before)
                assert torch.allclose(gathered, sums, atol=1e-5)
                comm.all_to_all(whole, x)
                assert torch.equal(turned, whole)


@pytest.mark.parametrize("n", [2, 3])
@on_ranks()
def test_repeated_calls_with_each_root_are_right(comm: Communicator) -> None:
    n, me = comm.size, comm.rank
    for turn in range(3):
        for root in range(n):
            inputs = torch.arange(n * 4 * n, dtype=torch.float32).view(n, 4 * n) + turn  # by rank
            mine, others = inputs[me].clone(), torch.full((4 * n,), -1.0)
            x, whole, part = mine.clone(), others.clone(), torch.empty(4)
            comm.broadcast(x, root)
            assert torch.equal(x, inputs[root])
            x = mine.clone()
            comm.reduce(x, root)
            assert torch.equal(x, inputs.sum(0) if me == root else mine)
            x = mine.clone()
            # in another tensor, and in its place in the whole
            for piece in (mine[:4], own_part(comm, whole).copy_(mine[:4])):
                comm.gather(whole if me == root else None, piece, root)
                gathered = whole.view(n, 4) if me == root else inputs[:, :4]
                assert torch.equal(gathered, inputs[:, :4])
            for out in (part, own_part(comm, x)):  # the root's part overlaps its input
                comm.scatter(out, x, root)
                assert torch.equal(out, own_part(comm, inputs[root]))
            comm.all_to_all(others, mine)
            assert torch.equal(others.view(n, 4), inputs.view(n, n, 4)[:, me])
            comm.all_to_all(mine, mine)
            assert torch.equal(mine, others)


@pytest.mark.parametrize("n", [2, 3])
@on_ranks()
def test_repeated_calls_with_uneven_parts_are_right(comm: Communicator) -> None:
    """Parts of other sizes with the same sum, apart and in their place in the whole."""
    n, me = comm.size, comm.rank
    for turn, sizes in product(range(3), permutations((0, 3, 5)[:n])):
        total, own, root = sum(sizes), sizes[me], turn % n
        inputs = torch.arange(float(n * total)).view(n, total) + turn  # by rank
        cut = [row.split(sizes) for row in inputs]
        joined = torch.cat([cut[q][q] for q in range(n)])
        mine, received = inputs[me].clone(), torch.empty(n * own)
        whole = torch.empty(total)
        for part in (torch.empty(own), whole.split(sizes)[me]):
            comm.reduce_scatter_v(part, mine, sizes)
            assert torch.equal(part, inputs.sum(0).split(sizes)[me])
            comm.scatter_v(part, mine, [*sizes], root)
            assert torch.equal(part, cut[root][me])
            comm.gather_v(whole, part.copy_(cut[me][me]), sizes, root)
            assert me != root or torch.equal(whole, joined)
            comm.all_gather_v(whole, part.copy_(cut[me][me]), sizes)
            assert torch.equal(whole, joined)
        comm.all_to_all_v(received, mine, [own] * n, sizes)
        assert torch.equal(received, torch.cat([cut[q][me] for q in range(n)]))
        in_place = mine.split(sizes)[me]
        comm.reduce_scatter_v(in_place, mine, sizes)
        assert torch.equal(in_place, inputs.sum(0).split(sizes)[me])
        with pytest.raises(UsageError, match=r"output has|sends itself|sizes\["):
            comm.all_to_all_v(received, mine, [own + 1] * n, sizes)
        with pytest.raises(UsageError, match="input has"):
            comm.all_gather_v(whole, torch.empty(own + 1), sizes)


@on_ranks(2)
def test_repeated_calls_take_no_other_arguments_than_the_first(comm: Communicator) -> None:
    each, x = [1] * comm.size, torch.ones(comm.size)
    for _ in range(2):
        comm.all_to_all_v(torch.empty_like(x), x, each, each)
        comm.barrier()
        with pytest.raises(TypeError, match="'algorithm'"):
            comm.all_to_all_v(torch.empty_like(x), x, each, each, algorithm="direct")  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="'algorithm'"):
            comm.barrier(algorithm="direct")  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="'tag'"):
            comm.barrier(tag=0)  # type: ignore[call-arg]


@on_ranks(2)
def test_results_are_copied_to_the_memory_given_in_the_call(comm: Communicator) -> None:
    """Before the data arrives, the output gets other memory and the inputs are overwritten."""
    n, each = comm.size, 70_000
    x, part = torch.ones(n * each), torch.empty(each)
    for _ in range(3):
        works = []
        for value in (1.0, 2.0):
            out = torch.zeros(each)
            works.append(comm.reduce_scatter(out, x.fill_(value), algorithm="ring", async_op=True))
            x.fill_(7)
            old, out.data = out.data, part
            works[-1].wait()
            assert torch.equal(old, torch.full((each,), value * n))
        with comm.group():
            comm.reduce_scatter(part, x.fill_(3), algorithm="ring")
        assert torch.equal(part, torch.full((each,), 3.0 * n))


@on_ranks(2)
def test_repeated_calls_join_a_group(comm: Communicator) -> None:
    xs = [torch.full((8,), comm.rank + 1.0) for _ in range(3)]
    comm.all_reduce(torch.ones(8))

    def grouped() -> None:
        with comm.group() as outer:
            with comm.group() as inner:
                comm.all_reduce(xs[0])
            comm.all_reduce(xs[1])
        assert [len(group.works) for group in (inner, outer)] == [1, 1]

    assert issued_by_python(comm, grouped) == 0
    comm.all_reduce(xs[2])
    for x in xs:
        assert torch.equal(x, torch.full((8,), 3.0))


@on_ranks(2)
def test_a_repeated_call_is_recorded_with_its_line(comm: Communicator) -> None:
    x = torch.ones(8, dtype=torch.int32)
    for _ in range(2):
        comm.all_reduce(x, "max", tag=5)
        line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
        number, kind, elements, site = comm._transport.call(comm.rank, comm.issued - 1)
        assert (number, elements) == (comm.issued - 1, 8)
        assert named(number, kind) == f"all_reduce #{number} (int32, max)"
        assert kind >> 24 == 5
        assert place(site).endswith(f"{__file__[-30:]}:{line}")


@on_ranks(2)
def test_a_negated_view_is_not_taken_for_the_plain_tensor(comm: Communicator) -> None:
    z, pair = torch.zeros(1, dtype=torch.complex64), torch.zeros(2)
    with comm.duplicate() as new:  # See Note [checked once]: it remembers no tensor of another test
        for plain in (True, True, False, True, False):
            z.fill_(complex(0, new.rank + 1))
            # each time in the place and memory of the one before
            new.all_reduce(z.imag if plain else z.conj().imag, "max")
            assert z.imag.item() == (2.0 if plain else 1.0)
            pair.fill_(new.rank + 1.0)
            new.all_reduce(pair if plain else torch._neg_view(pair), "max")  # type: ignore[attr-defined]
            assert pair.tolist() == [2.0 if plain else 1.0] * 2


def test_the_c_method_has_the_signature_and_docstring():
    assert list(inspect.signature(Communicator.all_reduce).parameters)[:3] == [
        "self",
        "tensor",
        "op",
    ]
    assert Communicator.all_reduce.__doc__.startswith("Reduce `tensor` element-wise")
    assert Communicator.all_reduce.__qualname__ == "Reductions.all_reduce"
