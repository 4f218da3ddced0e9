"""What a collective refuses before anything is sent, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import ringdp
from ringdp import Communicator
from ringdp.comm.programs import program
from ringdp.schedule import project, schedule

pytestmark = pytest.mark.process


def refusals(comm: Communicator) -> list[str]:
    three, six, ten = torch.zeros(3), torch.zeros(6), torch.zeros(10)
    calls: list[Callable[[], Any]] = [
        lambda: comm.all_reduce(torch.zeros(3, dtype=torch.bool), "avg"),
        lambda: comm.all_reduce(three, "mean"),  # type: ignore[arg-type]
        lambda: comm.all_reduce(torch.zeros(3, dtype=torch.int32), "avg"),
        lambda: comm.all_reduce(three, algorithm="magic"),
        lambda: comm.all_reduce(three, tag=-1),
        lambda: comm.all_reduce(three, tag=1 << 60),
        lambda: comm.all_reduce(three.to("meta")),
        lambda: comm.all_reduce(three, tag="a"),  # type: ignore[arg-type]
        lambda: comm.all_reduce([1.0]),  # type: ignore[arg-type]
        lambda: comm.all_gather(six, None),  # type: ignore[arg-type]
        lambda: comm.broadcast(three, 0.0),  # type: ignore[arg-type]
        lambda: comm.broadcast(three, 2),
        lambda: comm.broadcast(three, -1),
        lambda: comm.reduce_scatter(three, ten),
        lambda: comm.reduce_scatter(three, six.double()),
        lambda: comm.all_gather(ten, three),
        lambda: comm.all_gather_v(ten, three, [3, 3]),
        lambda: comm.all_gather_v(ten, three, [3, 7, 0]),
        lambda: comm.all_gather_v(ten, three, [13, -3]),
        lambda: comm.all_gather_v(ten, three, [3.0, 7.0]),  # type: ignore[list-item]
        lambda: comm.reduce_scatter_v(six, ten, [7, 3]),
        lambda: comm.gather(None if comm.rank == 0 else ten, three, root=2),
        lambda: comm.scatter(three, None, root=comm.rank),
        lambda: comm.all_to_all(six, ten),
        lambda: comm.all_to_all(three, three),
        lambda: comm.all_to_all_v(six, ten, [3, 3], [5, 6]),
        lambda: comm.all_to_all_v(ten, ten, [6 - 2 * comm.rank] * 2, [5, 5]),
        lambda: comm.all_to_all_v(ten, ten, [3 + comm.rank, 7 - comm.rank], [5, 5]),
        lambda: comm.all_reduce(torch.zeros(1).expand(3)),
        lambda: comm.broadcast(torch.zeros(1).expand(3), 1 - comm.rank),
        lambda: comm.all_reduce(three, "band"),
        lambda: comm.all_reduce(three, "max", scale=2),
        lambda: comm.all_reduce(three.int(), scale=2),
        lambda: comm.all_reduce(torch.zeros(3, dtype=torch.complex64), "max"),
        lambda: comm.all_reduce(torch.zeros(3, dtype=torch.uint16)),
        lambda: comm.all_reduce(torch.eye(3).to_sparse()),
        lambda: comm.all_gather(six, three.to("meta")),
        lambda: comm.all_gather(six.to("meta"), three, algorithm="ring"),
        lambda: comm.reduce_scatter(three.to("meta"), six),
        lambda: comm.all_to_all(six, six.to("meta")),
        lambda: comm.all_to_all_v(six, six.to("meta"), [3, 3], [3, 3]),
        lambda: comm.empty(4, -1),
        lambda: comm.empty(-1),
    ]
    said = []
    for call in calls:
        with pytest.raises(ringdp.UsageError) as error:
            call()
        said.append(str(error.value))
    x = torch.ones(4)
    comm.all_reduce(x)  # a refused call took no number: the ranks still agree
    assert torch.all(x == 2)
    return said


def test_refusals_say_what_was_given_and_what_is_allowed(ranks):
    allowed = [
        ("bool", "floats"),
        ("mean", "avg"),
        ("int32", "floats"),
        ("magic", "ring"),
        ("-1", "0.."),
        (str(1 << 60), "0.."),
        ("meta", "CPU"),
        ("tag is 'a'", "0.."),
        ("tensor is a list", "torch.Tensor"),
        ("tensor is a NoneType", "torch.Tensor"),
        ("root is 0.0", "0..1"),
        ("root is 2", "0..1"),
        ("root is -1", "0..1"),
        ("10", "2 (ranks) x 3"),
        ("float64", "float32"),
        ("10", "2 (ranks) x 3"),
        ("10", "6 (the sum of sizes)"),
        ("3, 7, 0", "each of 2 ranks"),
        ("13, -3", "0 or more"),
        ("3.0, 7.0", "whole numbers"),
        ("6", "sizes["),
        ("root is 2", "0..1"),
        ("input is None on the root", "a tensor"),
        ("10", "equally many"),
        ("3", "a multiple of 2"),
        ("input has 10", "input_sizes has 11"),
        ("output has 10", "output_sizes has"),
        ("expects", "the same"),
        ("expand()", "a place each"),
        ("expand()", "a place each"),
        ("band", "integers and bool"),
        ("max", "op 'sum'"),
        ("int32", "floats"),
        ("complex64", "sum and avg"),
        ("uint16", "bfloat16"),
        ("sparse", "dense"),
        ("on cpu", "on meta"),
        ("on cpu", "on meta"),
        ("on cpu", "on meta"),
        ("on meta", "one device"),
        ("on meta", "the same"),
        ("(4, -1)", "0 or more"),
        ("(-1,)", "0 or more"),
    ]
    for said in ranks(2)(refusals):
        for text, words in zip(said, allowed, strict=True):
            assert all(w in text for w in words), text


def freed(elements: int, offset: int) -> Tensor:
    x = torch.ones(offset + elements)[offset:]
    x.untyped_storage().resize_(0)
    return x


def cut(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(tensor.nbytes - 1)
    return tensor


def after_a_good_call(comm: Communicator) -> list[str]:
    """The same again is found by length, dtype, op and tag: what is not the same is looked at."""
    three, six, known = torch.ones(3), torch.ones(6), torch.ones(3)
    for _ in range(2):
        comm.all_reduce(three)
        comm.all_reduce(known)
        comm.all_gather(six, three)
    with FakeTensorMode():
        fake = torch.ones(3)
    calls: list[Callable[[], Any]] = [
        lambda: comm.all_reduce(freed(3, 0)),
        lambda: comm.all_reduce(freed(3, 2)),
        lambda: comm.all_reduce(cut(torch.ones(3))),
        lambda: comm.all_reduce(cut(known)),
        lambda: torch.vmap(comm.all_reduce)(torch.ones(2, 3)),
        lambda: torch.func.grad(lambda x: comm.all_reduce(x) or x.sum())(torch.ones(3)),
        lambda: comm.all_gather(freed(6, 0), three),
        lambda: comm.all_gather(six, freed(3, 0)),
        lambda: comm.all_gather(six, freed(3, 1)),
        lambda: comm.all_reduce(torch._to_functional_tensor(three)),
        lambda: comm.all_reduce(fake),
        lambda: comm.all_reduce(torch.nested.nested_tensor([three[:1], three[1:]])),
        lambda: comm.all_reduce(three, tag=1 << 70),
        lambda: comm.all_reduce(three, "sum\0"),  # type: ignore[arg-type]
    ]
    said = []
    for call in calls:
        with pytest.raises(ringdp.UsageError) as error:
            call()
        said.append(str(error.value))
    x = torch.ones(3)
    comm.all_reduce(x)
    assert torch.all(x == 2)
    return said


def test_a_call_that_looks_like_an_earlier_one_is_refused_too(ranks):
    words = ["no memory"] * 11 + ["nested", str(1 << 70), "no op"]
    for said in ranks(2)(after_a_good_call):
        for text, word in zip(said, words, strict=True):
            assert word in text


def only_one_refused(comm: Communicator) -> None:
    """A call refused on one rank only leaves the others' collective to be joined later."""
    if comm.rank == 0:
        with pytest.raises(ringdp.UsageError):
            comm.all_reduce(torch.zeros(3).to("meta"), "avg")
    x = torch.full((3,), float(comm.rank))
    comm.all_reduce(x)
    assert torch.all(x == 1)


def test_a_refusal_on_one_rank_is_no_collective(ranks):
    ranks(2)(only_one_refused)


@pytest.mark.parametrize("n", [16, 24])
def test_a_program_that_fuses_into_long_fifos_runs_unfused(n):
    """Fused halving needs 4 slots at n = 16 and 6 at n = 24; the plain program needs one."""
    plan = schedule("all_reduce", "halving", n)
    rows = len(program("all_reduce", "halving", n, 0, 0, 4).rows)
    assert (rows == len(project(plan, 0).rows)) == (n == 24)
