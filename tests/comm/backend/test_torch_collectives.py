"""Every call of torch.distributed gives the same bits over ringdp's backend as over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed import GatherOptions

from ringdp import CollectiveMismatch, Communicator, UsageError
from ringdp.comm.backend.calls import output_buffer
from ringdp.comm.reductions import dividing
from tests.comm.backend.cases import CASES
from tests.comm.backend.jobs import world
from tests.forks import Report
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

N = (2, 3)


def outcomes(comm: Communicator, report: Report) -> None:
    for backend in ("gloo", "ringdp"):
        with world(comm, backend):
            for name, case in CASES.items():
                report((backend, name, outcome(case, comm.rank, comm.size)))


def outcome(case: Any, rank: int, n: int) -> Any:
    try:
        return plain(case(rank, n))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def plain(value: Any) -> Any:
    """Without tensors, which would not pass through a pipe unchanged."""
    if isinstance(value, Tensor):
        bits = value.contiguous().view(-1)
        numbers = torch.view_as_real(bits) if bits.is_complex() else bits
        return str(value.dtype), tuple(value.shape), numbers.tolist()
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


@pytest.fixture(scope="module")
def results_of_calls(forks):
    """(n, backend, name) -> what the call left on each rank."""
    found: dict[tuple[int, str, str], list[Any]] = {}
    for n in N:
        for ended in forks(n, outcomes):
            assert ended.code == 0
            for backend, name, value in ended.reported:
                found.setdefault((n, backend, name), []).append(value)
    return found


@pytest.mark.parametrize("n", N)
@pytest.mark.parametrize("name", CASES)
def test_results_equal_those_over_gloo(results_of_calls, n, name):
    theirs, ours = results_of_calls[n, "gloo", name], results_of_calls[n, "ringdp", name]
    assert len(ours) == n
    errors = [value for value in theirs if isinstance(value, str)]
    if errors and "gloo does not support alltoall" in errors[0]:
        pytest.skip("torch 2.13's gloo has it, but not 2.11's")
    assert not errors
    assert ours == theirs


@on_ranks(3, pool="forked")
def test_calls_beyond_gloos_work(comm: Communicator) -> None:
    """Calls that gloo refuses or gets wrong."""
    n, rank = comm.size, comm.rank
    with world(comm, "ringdp") as group:
        x, y = torch.zeros(4, 6), torch.zeros(6, n * 2)
        x[:, ::2] = rank + 1
        dist.all_reduce(x[:, ::2])
        assert x.tolist() == [[n * (n + 1) / 2, 0.0] * 3] * 4
        x[:, 1::2] = rank
        dist.broadcast(x[:, 1::2], 1)
        assert x[:, 1::2].tolist() == [[1.0] * 3] * 4
        dist.all_gather_into_tensor(y[::2], torch.full((1, 6), float(rank)))
        assert y[::2].reshape(n, 6).tolist() == [[float(r)] * 6 for r in range(n)]
        assert y[1::2].sum() == 0
        stacked = torch.empty(n, 2, 3)
        dist.all_gather_into_tensor(stacked, torch.full((2, 3), float(rank)))
        assert stacked.flatten(1).tolist() == [[float(r)] * 6 for r in range(n)]
        small = torch.full((3,), rank).to(torch.float8_e4m3fn)
        parts = [torch.zeros(3, 1 + r % 2).to(small.dtype)[:, 0] for r in range(n)]
        dist.all_gather(parts, small)
        assert [p.float().tolist() for p in parts] == [[float(r)] * 3 for r in range(n)]
        uneven = [torch.empty(r + 1) for r in range(n)]
        dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
        assert [p.tolist() for p in uneven] == [[float(r)] * (r + 1) for r in range(n)]
        turned = [torch.empty(3, dtype=torch.complex64) for _ in range(n)]
        dist.gather(torch.full((3,), 1j * rank), turned if rank == 1 else None, 1)
        assert rank != 1 or [p.tolist() for p in turned] == [[1j * r] * 3 for r in range(n)]
        swapped = [torch.empty(1 + rank * r, 2) for r in range(n)]
        dist.all_to_all(swapped, [torch.full((1 + rank * r, 2), rank + 0.5 * r) for r in range(n)])
        assert [{*p.flatten().tolist()} for p in swapped] == [{r + 0.5 * rank} for r in range(n)]
        rooted = GatherOptions()
        rooted.rootRank = 1
        whole = torch.zeros(n, 2) if rank == 1 else torch.empty(0)
        group.gather_single(whole, torch.full((2,), float(rank)), rooted).wait()
        assert whole.tolist() == [[float(r)] * 2 for r in range(n) if rank == 1]
        scaled = torch.full((3,), rank + 1.0)
        dist.all_reduce(scaled, _make_nccl_premul_sum(0.5))
        assert scaled.tolist() == [n * (n + 1) / 4] * 3
        scattered = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([rank + 1.0]), (3,))
        dist.all_reduce(scattered, _make_nccl_premul_sum(0.5))
        assert scattered.to_dense().tolist() == [0, n * (n + 1) / 4, 0]
        scattered = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([rank, 1.0]), (3,))
        dist.all_reduce(scattered, dist.ReduceOp.AVG)
        assert scattered.to_dense().tolist() == [0, (n + 1) / 2, 0]
        whole, mean = torch.tensor([7, -7, rank]), torch.tensor([7, -7, rank])
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        dist.reduce(whole, 1, dist.ReduceOp.AVG)
        assert mean.tolist() == [7, -7, (n - 1) // 2]
        assert whole.tolist() == (mean.tolist() if rank == 1 else [7, -7, rank])
        part = torch.zeros(1, dtype=torch.int32)
        dist.reduce_scatter_tensor(part, torch.full((n,), -rank).int(), dist.ReduceOp.AVG)
        dist.reduce_scatter(part, list((part - rank + 1).expand(n, 1)), dist.ReduceOp.AVG)
        assert part.item() == 1 - (n - 1)


def refuse_wrong_calls(comm: Communicator, report: Report) -> None:
    """Bits of floats, and lists that do not hold one tensor of the right size per rank, are refused
    before data moves. Split sizes on some ranks only are a mismatch."""
    with world(comm, "ringdp") as group:
        part, lists = torch.full((2,), float(comm.rank)), [torch.zeros(2) for _ in range(comm.size)]
        for wrong in ([part[:1], torch.zeros(3)], list(part) * 2, [part], [part] * 3):
            if comm.rank == 0:
                with pytest.raises(UsageError, match=r"gather: output_tensors .* of \[\d"):
                    dist.gather(part, wrong)
                with pytest.raises(UsageError, match=r"scatter: input_tensors .*: 2, .* of 2, as"):
                    dist.scatter(part, wrong)
        for k in (0, 1, 3):
            few = [part.clone() for _ in range(k)]
            for call in (
                lambda few=few: dist.all_gather(few, part),
                lambda few=few: dist.all_gather_coalesced([few] * len(few), few[:1]),
                lambda few=few: dist.reduce_scatter(part, few),
                lambda few=few: dist.all_to_all(few, lists),
                lambda few=few: dist.all_to_all(lists, few),
            ):
                with pytest.raises(UsageError, match=f"has {k} entries; allowed: 2, one for eac"):
                    call()
        with pytest.raises(UsageError, match=r"of torch.\w+ and torch.\w+; allowed: one dtype"):
            group.allgather([[part, part.int()]], [part])
        for op in ("band", "bor", "bxor"):
            with pytest.raises(UsageError, match=f"{op} is for integers and bool, not for .*32"):
                dist.all_reduce(part, getattr(dist.ReduceOp, op.upper()))
        for work in (group.barrier(), dist.all_reduce(part.clone(), async_op=True)):
            with pytest.raises(UsageError, match="source_rank: not of a receive; allowed"):
                work.source_rank()
        six = torch.zeros(3, 2)
        for splits in ([[9, 9], [1, 2]], [[4, -1], []], [[3], [1, 2]], [[1, 1], [1, 2]]):
            with pytest.raises(UsageError, match=r"single: output_split_sizes .* of 2 .*, 3 in al"):
                dist.all_to_all_single(six, six, *splits)
        with pytest.raises(UsageError, match=r"input_split_sizes is \[3, 3\]; .* rows of input "):
            dist.all_to_all_single(six, six, [1, 2], [3, 3])
        with pytest.raises(
            UsageError, match=r"single: input of shape \(3, 2\) without split sizes"
        ):
            dist.all_to_all_single(six, six, [1, 2])
        dist.gather(part, lists if comm.rank == 0 else None)
        splits = [[1] * comm.size] * 2 if comm.rank == 0 else []
        with pytest.raises(
            CollectiveMismatch, match="parts, also if they are equal, on every rank"
        ):
            dist.all_to_all_single(part.clone(), part, *splits)
        report([t.tolist() for t in lists])


def test_wrong_calls_are_refused(forks):
    first, second = forks(2, refuse_wrong_calls)
    assert first.reported == [[[0.0, 0.0], [1.0, 1.0]]]
    assert second.reported == [[[0.0, 0.0], [0.0, 0.0]]]


def test_finishing_an_integer_average_twice_divides_once():
    total = torch.tensor([7, -7])
    finish = dividing(total, 2, "trunc")
    for _ in range(2):
        finish()
    assert total.tolist() == [3, -3]


def test_finishing_twice_copies_the_parts_back_again():
    parts = [torch.zeros(2, 3).t(), torch.zeros(0), torch.zeros(3)]
    whole, finish = output_buffer(parts)
    assert finish is not None
    whole.copy_(torch.arange(9.0))
    for _ in range(2):
        finish()
        assert [part.flatten().tolist() for part in parts] == [[0, 1, 2, 3, 4, 5], [], [6, 7, 8]]
        parts[0].zero_()
