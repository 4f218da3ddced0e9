"""The NCCL transport over the host NCCL: eight ranks, NCCL's own collectives, and injected
faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ringdp
from ringdp import Communicator
from tests.comm.failing import catch
from tests.forks import CALL_TIMEOUT, Report
from tests.ranks import on_ranks
from tests.transport.nccl.faults import FAIL, NONE, STALL, fault, only_with_host_nccl
from tests.transport.over import init_over
from tests.transport.test_conformance import ROWS, Case, assert_simulators_bits, results_of

only_with_host_nccl()
pytestmark = pytest.mark.process

LENGTHS = (0, 1, 7, 1003)
DTYPES = ("float32", "bfloat16")


def run_cases(comm: Communicator, report: Report, cases: list[Case]) -> None:
    with ringdp.init(transport="nccl-host", timeout=CALL_TIMEOUT) as other:
        report(results_of(other, cases))
        comm.barrier()


def test_eight_ranks_give_the_simulators_bits(forks):
    cases = [
        Case(*row, LENGTHS[(i + k) % 4], d)
        for k, d in enumerate(DTYPES)
        for i, row in enumerate(ROWS)
    ]

    def pool(_: Callable[..., Any], cases: list[Case]) -> list[list[bytes]]:
        return [results for _, (results,) in forks(8, run_cases, cases)]

    assert_simulators_bits(pool, 8, cases)


def call_with_nccl(function: Callable[..., Any], *arguments: Any) -> None:
    function(*arguments, algorithm="nccl")


@pytest.mark.parametrize("n", [1, 2, 3])
@on_ranks(pool="over_nccl")
def test_nccls_own_collectives_give_exact_sums(comm: Communicator) -> None:
    """Sums of small integers are exact in any order."""
    n, me = comm.size, comm.rank
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        x = (torch.arange(n * 5) % 7 + me).to(dtype)
        inputs = [(torch.arange(n * 5) % 7 + r).to(dtype) for r in range(n)]
        total, mine = sum(inputs[1:], inputs[0].clone()), slice(5 * me, 5 * me + 5)
        y = x.clone()
        call_with_nccl(comm.all_reduce, y)
        assert torch.equal(y, total)
        y = x.clone()
        call_with_nccl(comm.all_reduce, y, "max")
        assert torch.equal(y, inputs[-1])
        if dtype.is_floating_point:  # NCCL rounds an average of integers differently
            y = x.clone()
            call_with_nccl(comm.all_reduce, y, "avg")
            torch.testing.assert_close(y, total / n)
        out, root = torch.zeros(5, dtype=dtype), n - 1
        call_with_nccl(comm.reduce_scatter, out, x)
        assert torch.equal(out, total[mine])
        y = x.clone()
        call_with_nccl(comm.reduce, y, root)
        assert torch.equal(y, total if me == root else x)
        y = x.clone()
        call_with_nccl(comm.broadcast, y, root)
        assert torch.equal(y, inputs[root])
        whole = torch.zeros_like(x)
        parts = torch.cat([g[5 * r : 5 * r + 5] for r, g in enumerate(inputs)])
        call_with_nccl(comm.all_gather, whole, x[mine])
        assert torch.equal(whole, parts)
        sizes = [r + 1 for r in range(n)]
        whole = torch.zeros(sum(sizes), dtype=dtype)
        call_with_nccl(comm.all_gather_v, whole, x[: me + 1], sizes)
        assert torch.equal(whole, torch.cat([g[: r + 1] for r, g in enumerate(inputs)]))
        out = torch.zeros(me + 1, dtype=dtype)
        call_with_nccl(comm.reduce_scatter_v, out, x[: sum(sizes)], sizes)
        assert torch.equal(out, total[: sum(sizes)].split(sizes)[me])
        whole = torch.zeros_like(x)
        call_with_nccl(comm.gather, whole if me == root else None, x[mine], root)
        if me == root:
            assert torch.equal(whole, parts)
        call_with_nccl(
            comm.scatter, out := torch.zeros(5, dtype=dtype), x if me == root else None, root
        )
        assert torch.equal(out, inputs[root][mine])
        call_with_nccl(comm.all_to_all, whole := torch.zeros_like(x), x)
        assert torch.equal(whole, torch.cat([g[mine] for g in inputs]))
    with pytest.raises(ringdp.UsageError, match=r"'nccl' does not sum torch\.int16"):
        call_with_nccl(comm.all_reduce, torch.ones(3, dtype=torch.int16))
    direct = torch.full((4,), 0.1)
    # our algorithm again; a call prepared for NCCL must not be reused for it
    comm.all_reduce(direct)
    assert comm._ready is None


@pytest.mark.parametrize("what", [FAIL, STALL])
@on_ranks(3)
def test_a_fault_of_one_rank_is_raised_on_all(comm: Communicator, what: int) -> None:
    """Rank 1's third launch from now on fails or stalls; each collective has one launch for its
    stamp."""
    c = init_over(comm, "nccl-host")
    c.barrier()
    comm.barrier()
    if comm.rank == 1:
        fault(what, launches=2)
    x, timeout = torch.ones(1), 0.5 if what == STALL else None
    caught = catch(c, lambda: c.all_reduce(x), lambda: c.all_reduce(x, async_op=True).wait(timeout))
    c.close()
    fault(NONE)  # the launch may not have happened, if another rank was late before
    assert caught is not None
    if what == STALL:
        assert caught.error == caught.again == "CollectiveTimeout"
    else:
        assert caught.error == caught.again == "PeerLost"
        assert "rank 1 has aborted (NCCL: NCCL_ERROR_REMOTE_ERROR" in caught.text


def test_nccl_without_a_gpu_is_refused():
    with pytest.raises(ringdp.UsageError, match="needs a CUDA device, and torch sees none"):
        ringdp.init(transport="nccl")
