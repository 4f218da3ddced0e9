"""Arguments that a collective refuses before anything is sent, and the error messages."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import ringdp
from ringdp import Communicator, UsageError
from ringdp.comm.programs import program
from ringdp.schedule import Schedule, Transfer, project, schedule
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


@on_ranks(2)
def test_wrong_arguments_are_refused_with_what_is_allowed(comm: Any) -> None:
    three, six, ten = torch.zeros(3), torch.zeros(6), torch.zeros(10)
    calls: list[tuple[Callable[[], Any], str, str]] = [
        (lambda: comm.all_reduce(torch.zeros(3, dtype=torch.bool), "avg"), "bool", "floats"),
        (lambda: comm.all_reduce(three, "mean"), "mean", "avg"),
        (lambda: comm.all_reduce(torch.zeros(3, dtype=torch.int32), "avg"), "int32", "floats"),
        (lambda: comm.all_reduce(three, algorithm="magic"), "magic", "ring"),
        (lambda: comm.all_reduce(three, tag=-1), "-1", "0.."),
        (lambda: comm.all_reduce(three, tag=1 << 60), str(1 << 60), "0.."),
        (lambda: comm.all_reduce(three.to("meta")), "is on meta", "transport='nccl'"),
        (lambda: comm.all_reduce(three, tag="a"), "tag is 'a'", "0.."),
        (lambda: comm.all_reduce([1.0]), "tensor is a list", "torch.Tensor"),
        (lambda: comm.all_gather(six, None), "input is a NoneType", "torch.Tensor"),
        (lambda: comm.broadcast(three, 0.0), "root is 0.0", "0..1"),
        (lambda: comm.broadcast(three, 2), "root is 2", "0..1"),
        (lambda: comm.broadcast(three, -1), "root is -1", "0..1"),
        (lambda: comm.reduce_scatter(three, ten), "10", "2 (ranks) x 3"),
        (lambda: comm.reduce_scatter(three, six.double()), "float64", "float32"),
        (lambda: comm.all_gather(ten, three), "10", "2 (ranks) x 3"),
        (lambda: comm.all_gather_v(ten, three, [3, 3]), "10", "6 (the sum of sizes)"),
        (lambda: comm.all_gather_v(ten, three, [3, 7, 0]), "3, 7, 0", "each of 2 ranks"),
        (lambda: comm.all_gather_v(ten, three, [13, -3]), "13, -3", "0 or more"),
        (lambda: comm.all_gather_v(ten, three, [3.0, 7.0]), "3.0, 7.0", "whole numbers"),
        (lambda: comm.reduce_scatter_v(six, ten, [7, 3]), "6", "sizes["),
        (lambda: comm.gather(None if comm.rank == 0 else ten, three, root=2), "root is 2", "0..1"),
        (
            lambda: comm.scatter(three, None, root=comm.rank),
            "input is None on the root",
            "a tensor",
        ),
        (lambda: comm.all_to_all(six, ten), "10", "equally many"),
        (lambda: comm.all_to_all(three, three), "3", "a multiple of 2"),
        (lambda: comm.all_to_all_v(six, ten, [3, 3], [5, 6]), "input has 10", "input_sizes has 11"),
        (
            lambda: comm.all_to_all_v(ten, ten, [6 - 2 * comm.rank] * 2, [5, 5]),
            "output has 10",
            "output_sizes has",
        ),
        (
            lambda: comm.all_to_all_v(ten, ten, [3 + comm.rank, 7 - comm.rank], [5, 5]),
            "expects",
            "the same",
        ),
        (lambda: comm.all_reduce(torch.zeros(1).expand(3)), "expand()", "a place each"),
        (
            lambda: comm.broadcast(torch.zeros(1).expand(3), 1 - comm.rank),
            "expand()",
            "a place each",
        ),
        (lambda: comm.all_reduce(three, "band"), "band", "integers and bool"),
        (lambda: comm.all_reduce(three, "max", scale=2), "max", "op 'sum'"),
        (lambda: comm.all_reduce(three.int(), scale=2), "int32", "floats"),
        (
            lambda: comm.all_reduce(torch.zeros(3, dtype=torch.complex64), "max"),
            "complex64",
            "sum and avg",
        ),
        (lambda: comm.all_reduce(torch.zeros(3, dtype=torch.uint16)), "uint16", "bfloat16"),
        (lambda: comm.all_gather(six, three.to(torch.uint16)), "input is of torch.uint16", "bytes"),
        (lambda: comm.all_reduce(torch.eye(3).to_sparse()), "sparse", "dense"),
        (lambda: comm.all_gather(six, three.to("meta")), "on cpu", "on meta"),
        (lambda: comm.all_gather(six.to("meta"), three, algorithm="ring"), "on cpu", "on meta"),
        (lambda: comm.reduce_scatter(three.to("meta"), six), "on cpu", "on meta"),
        (lambda: comm.all_to_all(six, six.to("meta")), "on meta", "one device"),
        (lambda: comm.all_to_all_v(six, six.to("meta"), [3, 3], [3, 3]), "on meta", "the same"),
        (lambda: comm.empty(4, -1), "(4, -1)", "0.."),
        (lambda: comm.empty(-1), "(-1,)", "0.."),
    ]
    for call, *words in calls:
        with pytest.raises(ringdp.UsageError) as error:
            call()
        assert all(word in str(error.value) for word in words), f"{words}: {error.value}"
    x = torch.ones(4)
    comm.all_reduce(x)  # a refused call takes no number, so the ranks still agree
    assert torch.all(x == 2)


def barrier_in_a_group(comm: Any, *, timeout: float = 60.0, async_op: Any = True) -> None:
    with comm.group(async_op=async_op) as group:
        comm.barrier()
    group.wait(timeout)


@on_ranks(2)
def test_arguments_of_wrong_types_are_refused(comm: Any) -> None:
    me, peer = comm.rank, 1 - comm.rank
    three, six, even = torch.zeros(3), torch.zeros(6), [3, 3]
    huge = [3, 1 << 60] if me == 0 else [1 << 60, 3]
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: comm.all_gather([six], three), "all_gather: output is a list; allowed: a torch"),
        (lambda: comm.all_gather(torch.eye(3).to_sparse(), three), "output is torch.sparse_coo"),
        (lambda: comm.all_gather_v([six], three, even), "all_gather_v: output is a list"),
        (lambda: comm.gather([six], three, me), "gather: output is a list"),
        (lambda: comm.gather_v([six], three, even, me), "gather_v: output is a list"),
        (lambda: comm.gather_v(None, three, huge, peer), "2**56 in all"),
        (lambda: comm.scatter(three, [six], me), "scatter: input is a list"),
        (lambda: comm.scatter_v(three, [six], even, me), "scatter_v: input is a list"),
        (lambda: comm.reduce_scatter(None, six), "reduce_scatter: output is a NoneType"),
        (lambda: comm.reduce_scatter_v([three], six, even), "reduce_scatter_v: output is a list"),
        (lambda: comm.all_to_all([six], six), "all_to_all: output is a list"),
        (lambda: comm.all_to_all(six, [six]), "all_to_all: input is a list"),
        (lambda: comm.all_to_all_v([six], six, even, even), "all_to_all_v: output is a list"),
        (lambda: comm.broadcast(None), "broadcast: tensor is a NoneType"),
        (lambda: comm.all_reduce(three, algorithm=["ring"]), "algorithm is ['ring']; allowed: a"),
        (lambda: comm.all_reduce(three, algorithm=1), "algorithm is 1; allowed: a name"),
        (lambda: comm.all_reduce(three, np.array(["sum"])), "no op array(['sum']"),
        (lambda: comm.all_reduce(three, scale="2"), "scale is '2'; allowed: a number"),
        (lambda: comm.reduce(three, scale=torch.ones(2)), "scale is tensor([1., 1.])"),
        (lambda: comm.reduce_scatter(three, six, scale=1j), "scale is 1j"),
        (lambda: comm.all_reduce(three, async_op="no"), "async_op is 'no'; allowed: True or False"),
        (lambda: barrier_in_a_group(comm, async_op=1), "group: async_op is 1; allowed: True or"),
        (lambda: comm.label(7), "label is 7; allowed: a text"),
        (lambda: comm.all_reduce(three, tag=1.0), "tag is 1.0; tags are 0.."),
        (lambda: comm.broadcast(three, torch.zeros((), device="meta")), "ranks are 0..1"),
        (lambda: comm.empty((2, 3)), "a length is (2, 3); lengths are 0.."),
        (lambda: comm.empty(1 << 70), "a length is 1180591620717411303424"),
        (lambda: comm.empty(2, dtype="float32"), "dtype is 'float32'; allowed: a torch.dtype"),
        (lambda: comm.split("a"), "color is 'a'; but for None, colors are 0.."),
        (lambda: comm.split(0, key=1.5), "key is 1.5; keys are -"),
        (lambda: comm.set_timeout(float("nan")), "timeout is nan; allowed: seconds, above 0"),
        (lambda: comm.set_timeout("1"), "timeout is '1'"),
        (lambda: comm.all_reduce(three, async_op=True).wait("1"), "timeout is '1'; allowed: sec"),
        (
            lambda: barrier_in_a_group(comm, timeout=float("nan")),
            "timeout is nan; allowed: seconds, or",
        ),
        (lambda: comm.send(three, float(peer)), f"dst is {peer}.0; allowed: another rank"),
        (lambda: comm.send(three, None), "dst is None; allowed: another rank"),
        (lambda: comm.isend([three], peer), "tensor is a list"),
        (lambda: comm.recv(three, float(peer)), f"src is {peer}.0; allowed: another rank"),
        (lambda: comm.recv(None, peer), "tensor is a NoneType"),
        (lambda: comm.irecv(three, me), f"src is {me}; allowed: another rank"),
    ]
    for _ in range(2):  # the second time the valid calls below are repeated ones
        for call, message in calls:
            with pytest.raises(ringdp.UsageError, match=re.escape(message)):
                call()
        x = torch.ones(3)
        comm.all_reduce(x)
        assert torch.all(x == 2)
        for root in range(2):
            comm.all_gather(six, three)
            comm.gather(six, three, root)
            comm.scatter(three, six, root)
            comm.reduce_scatter(three, six)
            comm.all_to_all(six, six)


@on_ranks(2)
def test_numbers_of_numpy_and_torch_are_accepted(comm: Any) -> None:
    wholes = (np.int64, torch.tensor, np.uint8)
    for whole in wholes:
        x = torch.full((2,), float(comm.rank))
        comm.broadcast(x, whole(1), tag=whole(3))
        assert torch.all(x == 1)
        comm.all_gather_v(y := torch.zeros(4), x, [whole(2)] * 2)
        assert torch.all(y == 1)
        work = comm.isend(x + comm.rank, whole(1 - comm.rank), tag=whole(1))
        assert comm.recv(x, whole(1 - comm.rank), tag=1) == 1 - comm.rank
        assert torch.all(x == 2 - comm.rank)
        work.wait(whole(60))
        comm.split(whole(0), key=whole(2)).close()
    for scale in (np.float32(0.5), Fraction(1, 2), torch.tensor(0.5), np.float64(0.5)):
        x = torch.ones(3)
        comm.all_reduce(x, scale=scale)
        assert torch.all(x == 1)
    x = torch.ones(3)
    comm.all_reduce(x, scale=float("nan"))
    assert torch.all(x.isnan())


@on_ranks(1)
def test_a_single_rank_cannot_send_or_receive(comm: Any) -> None:
    for call in (lambda: comm.recv(torch.ones(3)), lambda: comm.send(torch.ones(3), 0)):
        with pytest.raises(ringdp.UsageError, match="allowed: another rank, of \\[\\]"):
            call()


def freed(elements: int, offset: int) -> Tensor:
    x = torch.ones(offset + elements)[offset:]
    x.untyped_storage().resize_(0)
    return x


def cut(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(tensor.nbytes - 1)
    return tensor


@on_ranks(2)
def test_calls_that_resemble_a_repeated_one_are_checked(comm: Any) -> None:
    """Repeated calls are recognised by length, dtype, op and tag; other properties must still be
    checked."""
    three, six, known = torch.ones(3), torch.ones(6), torch.ones(3)
    for _ in range(2):
        comm.all_reduce(three)
        comm.all_reduce(known)
        comm.all_gather(six, three)
    with FakeTensorMode():
        fake = torch.ones(3)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: comm.all_reduce(freed(3, 0)), "no memory"),
        (lambda: comm.all_reduce(freed(3, 2)), "no memory"),
        (lambda: comm.all_reduce(cut(torch.ones(3))), "no memory"),
        (lambda: comm.all_reduce(cut(known)), "no memory"),
        (lambda: torch.vmap(comm.all_reduce)(torch.ones(2, 3)), "no memory"),
        (
            lambda: torch.func.grad(lambda x: comm.all_reduce(x) or x.sum())(torch.ones(3)),
            "no memory",
        ),
        (lambda: comm.all_gather(freed(6, 0), three), "no memory"),
        (lambda: comm.all_gather(six, freed(3, 0)), "no memory"),
        (lambda: comm.all_gather(six, freed(3, 1)), "no memory"),
        (lambda: comm.all_reduce(torch._to_functional_tensor(three)), "no memory"),
        (lambda: comm.all_reduce(fake), "no memory"),
        (lambda: comm.all_reduce(torch.nested.nested_tensor([three[:1], three[1:]])), "nested"),
        (lambda: comm.all_reduce(three, tag=1 << 70), str(1 << 70)),
        (lambda: comm.all_reduce(three, "sum\0"), "no op"),
    ]
    for call, word in calls:
        with pytest.raises(ringdp.UsageError, match=word):
            call()
    x = torch.ones(3)
    comm.all_reduce(x)
    assert torch.all(x == 2)


@on_ranks(2)
def test_a_call_refused_on_one_rank_does_not_count(comm: Communicator) -> None:
    """A call refused on one rank only: the others' collective can be joined later."""
    if comm.rank == 0:
        with pytest.raises(ringdp.UsageError):
            comm.all_reduce(torch.zeros(3).to("meta"), "avg")
    x = torch.full((3,), float(comm.rank))
    comm.all_reduce(x)
    assert torch.all(x == 1)


def broadcast_through_chunk_1(n: int) -> Schedule:
    """A broadcast on 2 ranks that moves chunk 0 through chunk 1."""
    return Schedule(
        n,
        2,
        (
            (Transfer(0, 1, 0, 1, False),),
            (Transfer(1, 1, 1, 0, False),),
            (Transfer(0, 1, 1, 1, False),),
        ),
    )


@on_ranks(2)
def test_a_schedule_that_mixes_unequal_chunks_is_refused(comm: Communicator) -> None:
    x = torch.arange(4.0) * (1 - comm.rank)
    uneven = r"chunks 0 and 1 to be equally long.*of 5 elements they are 3 and 2"
    with pytest.raises(UsageError, match=uneven):
        comm.broadcast(torch.ones(5), algorithm=broadcast_through_chunk_1)
    comm.broadcast(x, algorithm=broadcast_through_chunk_1)
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]


def all_reduce_through_chunk_1(n: int) -> Schedule:
    """An all_reduce whose rank 0 moves chunk 0 to chunk 1 and back; chunk 1 is aside meanwhile."""
    moves = (Transfer(0, 0, read, write, False) for read, write in ((1, 2), (0, 1), (1, 0), (2, 1)))
    inward = tuple(Transfer(r, 0, c, c, True) for r in range(1, n) for c in (0, 1))
    up = Schedule(n, 2, (inward,))
    return Schedule(n, 2, tuple((move,) for move in moves)).then(up.then(up.transpose()))


@on_ranks(2)
def test_a_call_that_is_refused_has_not_scaled_its_tensor(comm: Communicator) -> None:
    x = torch.ones(5)
    with pytest.raises(UsageError, match="of 5 elements they are 3 and 2"):
        comm.all_reduce(x, scale=0.5, algorithm=all_reduce_through_chunk_1)
    assert x.tolist() == [1] * 5
    comm.all_reduce(x[:4], scale=0.5, algorithm=all_reduce_through_chunk_1)
    assert x.tolist() == [1] * 5


@pytest.mark.parametrize("n", [16, 24])
def test_a_program_that_would_need_deep_fifos_is_not_fused(n):
    """Fused halving needs 4 slots at n = 16 and 6 at n = 24; the plain program needs one."""
    plan = schedule("all_reduce", "halving", n)
    rows = len(program("all_reduce", "halving", n, 0, 0, 4).rows)
    assert (rows == len(project(plan, 0).rows)) == (n == 24)
