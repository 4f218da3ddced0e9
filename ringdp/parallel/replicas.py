"""Makes replicas equal: checks that all ranks have the same parameters; broadcasts their values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parameter import is_lazy

from ringdp.comm import Communicator
from ringdp.comm.buffers import lacks_memory
from ringdp.errors import ModelError, UsageError

PIECE = 250 << 20  # bytes that one broadcast moves at most; a larger tensor goes alone
Facts = Sequence[tuple[str, dict[str, Any]]]  # each parameter's name, and what must be equal


def facts_of(p: Tensor) -> dict[str, Any]:
    return {"sizes": [*p.shape], "strides": [*p.stride()], "dtype": str(p.dtype)}


def check_equal(comm: Communicator, mine: Facts, who: str = "DDP") -> None:
    """Raise ModelError, on every rank, unless all ranks have the same facts, whatever the names.

    Collective. `who` expects it, as the error says.
    """
    first, *others = gather_json(comm, mine)
    for rank, facts in enumerate(others, start=1):
        if problem := _difference(first, facts, rank):
            raise ModelError(f"{who} expects same model across all ranks, but {problem}")


def check_places(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ModelError, on every rank alike, for a tensor that cannot be written."""
    for name, t in tensors:
        if any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape, strict=True)):
            raise ModelError(
                f"{name} of shape {tuple(t.shape)} was made by expand(): more than one element of "
                "it refers to a single memory location, so that it cannot be written. Please "
                "clone() it, or leave it out by _set_params_and_buffers_to_ignore_for_model"
            )


def check_writable(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise UsageError for a tensor that could not take rank 0's values: one that only
    inference_mode may write to, or whose elements lie in no plain memory."""
    for name, t in tensors:
        if t.layout != torch.strided or t.is_quantized or t.is_nested:
            kind = "nested" if t.is_nested else t.dtype if t.is_quantized else t.layout
            raise UsageError(
                f"{name} is {kind}; allowed: dense tensors that are not quantized. Keep it in an "
                "attribute that is no buffer"
            )
        if is_lazy(t):
            continue
        if t.is_inference():
            raise UsageError(f"{name} was made in torch.inference_mode(); make it outside of that")
        if not t.is_meta and lacks_memory(t):
            raise UsageError(
                f"{name}, a {type(t).__name__}, has no memory of its own: it stands for other "
                "tensors, or its storage was freed; allowed: ordinary tensors"
            )


def _difference(first: Facts, facts: Facts, rank: int) -> str | None:
    for index, (zero, here) in enumerate(zip_longest(first, facts)):
        if zero is None or here is None:
            return (
                f"Rank 0 has {len(first)} params, while rank {rank} has inconsistent {len(facts)} "
                f"params: {(zero or here)[0]!r} is on one of them only"
            )
        for what, value in here[1].items():
            if value != zero[1][what]:
                return (
                    f"params[{index}], {here[0]!r} with {what} {value} on rank {rank}, appears not "
                    f"to match {what} of the same param in process 0: {zero[0]!r} with {what} "
                    f"{zero[1][what]}"
                )
    return None


def gather_json(comm: Communicator, value: object) -> list[Any]:
    """Every rank's value, which must be JSON. Collective."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = torch.empty(comm.size, dtype=torch.int64, device="cpu")
    comm.all_gather(sizes, torch.tensor([data.numel()], device="cpu"))
    each = sizes.tolist()
    whole = torch.empty(sum(each), dtype=torch.uint8, device="cpu")
    comm.all_gather_v(whole, data, each)
    return [json.loads(part.numpy().tobytes()) for part in torch.split(whole, each)]


def broadcast(
    comm: Communicator, tensors: Iterable[Tensor], root: int = 0, most: int = PIECE
) -> None:
    """Every tensor takes the root's values, in messages of up to `most` bytes. Collective.

    They go as bytes, since communicators do not know every dtype. Autograd does not see the write,
    so a forward may still wait for its backward.
    """
    piece: list[Tensor] = []
    held = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if held + size > most:
            _broadcast(comm, piece, root)
            piece, held = [], 0
        piece.append(tensor.detach())
        held += size
    _broadcast(comm, piece, root)


def _broadcast(comm: Communicator, tensors: Sequence[Tensor], root: int) -> None:
    if not tensors:
        return
    flat = torch.cat([t.contiguous().resolve_conj().view(-1).view(torch.uint8) for t in tensors])
    comm.broadcast(flat, root)
    if comm.rank == root:
        return
    sizes = [t.numel() * t.element_size() for t in tensors]
    with _unsafe_preserve_version_counter(tuple(tensors)):
        for t, part in zip(tensors, torch.split(flat, sizes), strict=True):
            write(t, part.clone().view(t.dtype).view(t.shape))  # a clone, to be aligned


def write(tensor: Tensor, values: Tensor) -> None:
    """copy_ that also works on an expanded tensor, whose values repeat."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)
