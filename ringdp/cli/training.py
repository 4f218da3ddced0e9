"""One training loop, for the single process and for every rank of every stage.

What differs between them comes in as functions: which rows are mine, how a loss is averaged.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ringdp.cli import gpt, text
from ringdp.cli.options import Options


class Step(NamedTuple):
    """One finished step."""

    loss: float  # mean over the global batch, before the update
    seconds: float


class Optimizer(Protocol):
    """What the loop asks of one."""

    def zero_grad(self) -> None: ...

    def step(self) -> object: ...


class Progress(NamedTuple):
    """What a run says of itself while it goes on."""

    run: str
    step: int  # finished steps
    steps: int
    loss: float
    tokens_per_second: float
    memory: dict[str, int]  # bytes on this rank by category; empty for the single process


def train(
    model: nn.Module,
    optimizer: Optimizer,
    data: bytes,
    options: Options,
    *,
    rows: slice,
    mean: Callable[[Tensor], Tensor],
) -> Iterator[Step]:
    """Yield after every step. `rows` are this process's of each global batch."""
    device = next(model.parameters()).device
    for index in range(options.steps):
        start = time.perf_counter()
        tokens = text.batch(data, options.seed, index, options.global_batch, options.context)
        optimizer.zero_grad()
        loss = gpt.next_byte_loss(model, torch.from_numpy(tokens[rows]).to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        value = mean(loss.detach()).item()
        yield Step(value, time.perf_counter() - start)


def parameter_digest(model: nn.Module) -> str:
    """Of the bits of all parameters, in order."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
