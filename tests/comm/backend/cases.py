"""Calls of torch.distributed as functions (rank, n) -> what the call leaves on that rank.

All numbers are small integers, so every order of additions gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed import ReduceOp

REAL = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
MOVED = (*REAL, torch.bool, torch.complex64)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7,), (3, 0, 2), (2, 3), (513, 5))
Case = Callable[[int, int], Any]
CASES: dict[str, Case] = {}


def case(*arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers `function(rank, n, argument)` as a case for each argument, or `function(rank, n)`
    as one."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        for a in arguments:
            CASES[f"{name} {a}"] = lambda rank, n, a=a: function(rank, n, a)
        if not arguments:
            CASES[name] = function
        return function

    return enter


def input_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    seed = torch.Generator().manual_seed(rank)
    x = torch.randint(0, 3, shape, generator=seed)
    return (x + 1j * (x + rank)).to(dtype) if dtype.is_complex else x.to(dtype)


@case(*MOVED)
def broadcast(rank, n, dtype):
    kept = [input_of(rank, shape, dtype) for shape in SHAPES]
    for i, x in enumerate(kept):
        dist.broadcast(x, i % n)
    return kept


@case(*REAL, torch.complex64)
def all_reduce(rank, n, dtype):
    kept = [input_of(rank, shape, dtype) for shape in SHAPES]
    for x in kept:
        dist.all_reduce(x)
    return kept


OPS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG")


@case(*OPS)
def operator(rank, n, name):
    x = input_of(rank, (9,), torch.float32 if name == "AVG" else torch.int32)
    dist.all_reduce(x, getattr(ReduceOp, name))
    return x


@case(*SHAPES)
def reduce(rank, n, shape):
    x = input_of(rank, shape)
    dist.reduce(x, n - 1, ReduceOp.MAX)
    return x if rank == n - 1 else None


@case(*MOVED)
def all_gather(rank, n, dtype):
    kept = []
    for shape in SHAPES:
        parts = [torch.empty(shape, dtype=dtype) for _ in range(n)]
        dist.all_gather(parts, input_of(rank, shape, dtype))
        kept.append(parts)
    return kept


@case()
def all_gather_to_parts_of_one(rank, n):
    whole = torch.empty(n, 2, 3)
    dist.all_gather(list(whole.unbind()), input_of(rank, (2, 3)))
    columns = torch.empty(3, n)
    dist.all_gather(list(columns.unbind(1)), input_of(rank, (3,)))
    return whole, columns


@case(*REAL, torch.bool)
def all_gather_into_tensor(rank, n, dtype):
    whole = torch.empty(2 * n, 3, dtype=dtype)
    dist.all_gather_into_tensor(whole, input_of(rank, (2, 3), dtype))
    return whole


@case()
def all_gather_coalesced(rank, n):
    parts = [[torch.empty(2, 3), torch.empty(4)] for _ in range(n)]
    dist.all_gather_coalesced(parts, [input_of(rank, (2, 3)), input_of(rank, (4,))])
    return parts


@case()
def all_reduce_coalesced(rank, n):
    kept = [input_of(rank, (2, 3)), input_of(rank, (4,)), input_of(rank, (2,), torch.float32).t()]
    dist.all_reduce_coalesced(kept)
    x = input_of(rank, (2, 3))
    for shared in ([x, x], [x, x.t()], [x[0], x[:, 0], x]):
        dist.all_reduce_coalesced(shared, async_op=True).wait()
        kept += [x.clone()]
    return kept


@case(*REAL)
def reduce_scatter_tensor(rank, n, dtype):
    out = torch.empty(5, dtype=dtype)
    dist.reduce_scatter_tensor(out, input_of(rank, (5 * n,), dtype))
    return out


@case()
def reduce_scatter(rank, n):
    out = torch.empty(2, 3)
    dist.reduce_scatter(out, [input_of(rank + 10 * r, (2, 3)) for r in range(n)])
    return out


@case(*REAL, torch.bool)
def gather(rank, n, dtype):
    kept = []
    for root in range(n):
        parts = [torch.empty(3, dtype=dtype) for _ in range(n)] if rank == root else None
        dist.gather(input_of(rank, (3,), dtype), parts, root)
        kept.append(parts)
    return kept


@case(*MOVED)
def scatter(rank, n, dtype):
    kept = []
    for root in range(n):
        parts = [input_of(root + 10 * r, (3,), dtype) for r in range(n)] if rank == root else None
        out = torch.empty(3, dtype=dtype)
        dist.scatter(out, parts, root)
        kept.append(out)
    return kept


@case(*MOVED)
def all_to_all_single(rank, n, dtype):
    out = torch.empty(2 * n, 3, dtype=dtype)
    dist.all_to_all_single(out, input_of(rank, (2 * n, 3), dtype))
    return out


@case()
def all_to_all_single_uneven(rank, n):
    # rows; what r sends to s is as long as what s sends to r
    sent = [(rank + r) % 3 for r in range(n)]
    out = torch.empty(sum(sent), 2)
    dist.all_to_all_single(out, input_of(rank, (sum(sent), 2)), sent, sent)
    return out


@case()
def all_to_all(rank, n):
    out = [torch.empty(3, 2) for _ in range(n)]
    dist.all_to_all(out, [input_of(rank + 10 * r, (3, 2)) for r in range(n)])
    return out


@case(*MOVED)
def send_and_recv(rank, n, dtype):
    kept = []
    for shape in SHAPES:
        x = torch.empty(shape, dtype=dtype)
        after, before = (rank + 1) % n, (rank - 1) % n
        if rank % 2:
            dist.recv(x, before)
            dist.send(input_of(rank, shape, dtype), after)
        else:
            dist.send(input_of(rank, shape, dtype), after)
            dist.recv(x, before)
        kept.append(x)
    return kept


@case()
def tags(rank, n):
    kept = [torch.empty(3) for _ in range(3)]
    sent = [dist.isend(input_of(rank + 10 * t, (3,)), (rank + 1) % n, tag=t) for t in range(3)]
    for t in (2, 0, 1):
        dist.irecv(kept[t], (rank - 1) % n, tag=t).wait()
    for work in sent:
        work.wait()
    return kept


ANY = 7  # a tag of this case only: a fast rank may already be in the next case


@case()
def any_source(rank, n):
    if rank:
        dist.send(torch.tensor([rank]), 0, tag=ANY)
        return None
    senders = {}
    for _ in range(n - 1):
        x = torch.empty(1, dtype=torch.int64)
        senders[dist.recv(x, tag=ANY)] = x
    return sorted(senders.items())


@case()
def batch_isend_irecv(rank, n):
    x = torch.empty(1000)
    ops = [
        dist.P2POp(dist.isend, input_of(rank, (1000,)), (rank + 1) % n),
        dist.P2POp(dist.irecv, x, (rank - 1) % n),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return x


@case()
def transposed(rank, n):
    x, y = input_of(rank, (4, 6)).t(), input_of(rank, (4, 6)).t()
    dist.all_reduce(x)
    dist.broadcast(y, n - 1)
    return x, y


@case()
def sparse(rank, n):
    x = torch.sparse_coo_tensor(torch.tensor([[rank, 3, 3]]), torch.ones(3, 2), (n + 4, 2))
    dist.all_reduce(x)
    return x.to_dense()


@case()
def objects(rank, n):
    gathered: list[Any] = [None] * n
    dist.all_gather_object(gathered, {"rank": rank, "long": "x" * 10**rank})
    broadcast_list: list[Any] = [{"of": rank}, rank]
    dist.broadcast_object_list(broadcast_list, n - 1)
    collected: list[Any] | None = [None] * n if rank == 0 else None
    dist.gather_object(("from", rank), collected, 0)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(n)], 0)
    passed: list[Any] = [rank]
    if rank == 0:
        dist.send_object_list(["hello"], 1)
    if rank == 1:
        dist.recv_object_list(passed, 0)
    return gathered, broadcast_list, collected, mine, passed


@case()
def asynchronous(rank, n):
    x, y, out = input_of(rank, (5,)), input_of(rank, (5,)), torch.empty(n * 5)
    works = [dist.all_reduce(x, async_op=True), dist.broadcast(y, 1, async_op=True)]
    works.append(dist.all_gather_into_tensor(out, input_of(rank, (5,)), async_op=True))
    works.append(dist.barrier(async_op=True))
    for work in reversed(works):
        work.wait()
    return x, y, out, [work.is_completed() for work in works]


@case()
def coalescing(rank, n):
    kept = [input_of(rank, (k,)) for k in (3, 1, 8)]
    with dist.distributed_c10d._coalescing_manager():
        for x in kept:
            dist.all_reduce(x)
    outs = [torch.empty(n * 2), torch.empty(n * 3)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for k, out in enumerate(outs):
            dist.all_gather_into_tensor(out, input_of(rank, (2 + k,)))
    manager.wait()
    parts = [torch.empty(2), torch.empty(3)]
    with dist.distributed_c10d._coalescing_manager():
        for k, part in enumerate(parts):
            dist.reduce_scatter_tensor(part, input_of(rank, (n * (2 + k),)))
    return kept, outs, parts


@case()
def subgroups(rank, n):
    kept = []
    for members in ([0, n - 1], list(range(1, n))):
        group = dist.new_group(members)
        if rank in members:
            x = input_of(rank, (4,))
            dist.all_reduce(x, group=group)
            y = input_of(rank, (4,))
            dist.broadcast(y, members[-1], group=group)
            kept += [x, y, dist.get_rank(group), dist.get_process_group_ranks(group)]
    return kept


@case()
def functional(rank, n):
    group = dist.group.WORLD
    started = [
        funcol.all_reduce(input_of(rank, (4,)), "sum", group),
        funcol.all_gather_tensor(input_of(rank, (2, 3)), 1, group),
        funcol.reduce_scatter_tensor(input_of(rank, (2, 3 * n)), "sum", 1, group),
        funcol.all_to_all_single(input_of(rank, (n,)), None, None, group),
        funcol.broadcast(input_of(rank, (4,)), n - 1, group),
        *funcol.all_reduce_coalesced([input_of(rank, (2,))], "max", group),
    ]
    return [funcol.wait_tensor(x) for x in started]
