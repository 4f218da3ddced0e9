"""all_reduce of sparse tensors, as in gloo: every rank gathers all ranks' elements and adds them.

    result = sum over ranks, in rank order, of the coalesced tensors, times `scale`

An average is the sum divided by the number of ranks.

Every rank sends every other its indices, 8 bytes per element and dimension, and its values. The
call blocks even if it is asynchronous. DDP also uses it for sparse gradients.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ringdp.comm.communicator import Communicator
from ringdp.comm.work import ENDED, Work
from ringdp.errors import UsageError
from ringdp.transport.base import ReduceOp
from ringdp.transport.bounds import bounds_of
from ringdp.transport.rows import divisor


def all_reduce_sparse(
    comm: Communicator, tensor: Tensor, op: ReduceOp, scale: float | None = None
) -> Work:
    """All-reduce `tensor` in place: torch.sparse_coo, of the same shape and dtype on all ranks.

    Raises UsageError for other layouts, or other ops than sum and avg.
    """
    if tensor.layout is not torch.sparse_coo or op not in ("sum", "avg"):
        raise UsageError(
            f"allreduce: {op} of a tensor of layout {tensor.layout}; allowed for other than dense "
            "tensors: sum and avg, of torch.sparse_coo"
        )
    total = sum_of_sparse(comm, tensor.detach(), scale=scale)
    if op == "avg":
        total /= divisor(total, comm.size)
    with torch.no_grad():  # a detached tensor would not share its indices and values
        tensor.copy_(total)
    return ENDED


def sum_of_sparse(
    comm: Communicator, tensor: Tensor, *, scale: float | None = None, tag: int = 0
) -> Tensor:
    """Return the coalesced sum of all ranks' COO tensors. Collective."""
    coalesced = tensor.coalesce()
    indices, values = coalesced.indices(), coalesced.values()
    if scale is not None:
        values = values * scale
    counts = torch.empty(comm.size, dtype=torch.int64, device="cpu")
    comm.all_gather(counts, torch.tensor([values.shape[0]], device="cpu"), tag=tag)
    each = counts.tolist()
    row = values.shape[1:].numel()
    all_indices = indices.new_empty(sum(each), indices.shape[0])
    all_values = values.new_empty(sum(each), *values.shape[1:])
    comm.all_gather_v(all_indices, indices.t(), [n * indices.shape[0] for n in each], tag=tag)
    comm.all_gather_v(all_values, values, [n * row for n in each], tag=tag)
    total = torch.zeros_like(coalesced)
    for begin, end in pairwise(bounds_of(each)):
        total += torch.sparse_coo_tensor(
            all_indices[begin:end].t(),
            all_values[begin:end],
            tensor.shape,
            is_coalesced=True,
            check_invariants=False,
            device=values.device,
        )
    return total.coalesce()
