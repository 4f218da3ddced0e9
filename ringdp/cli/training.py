"""One training loop, for the single process, every rank of every stage, and every mode.

Whatever differs between them is passed in: which rows to learn, and how to average a loss.
"""

import hashlib
import time
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ringdp.cli import gpt, text
from ringdp.cli.options import Options

REPORT_EVERY = 0.2  # s


class Optimizer(Protocol):
    """The part of an optimizer that the loop uses."""

    def zero_grad(self) -> None: ...

    def step(self) -> object: ...


class Progress(NamedTuple):
    """How far a run is."""

    run: str
    step: int  # finished steps
    steps: int
    loss: float
    tokens_per_second: float
    memory: dict[str, int]  # bytes on this rank by category; empty for the single process


class Trained(NamedTuple):
    """One entry per step."""

    loss: tuple[float, ...]  # before the update
    seconds: tuple[float, ...]
    sent: tuple[int, ...]  # bytes


def train(
    run: str,
    model: nn.Module,
    optimizer: Optimizer,
    data: bytes,
    options: Options,
    emit: Callable[[Progress], None] | None,
    *,
    rows: slice = slice(None),
    mean: Callable[[Tensor], Tensor] = lambda loss: loss,
    memory: Callable[[], dict[str, int]] = dict,
    sent: Callable[[], int] = lambda: 0,
) -> Trained:
    """Train for `options.steps` steps on `rows` of each global batch.

    `emit` gets progress after the first step, the last, and every REPORT_EVERY seconds. `sent` is a
    counter of all bytes sent so far.
    """
    device = next(model.parameters()).device
    losses, seconds, totals, due = list[float](), list[float](), [sent()], 0.0
    for index in range(options.steps):
        start = time.perf_counter()
        tokens = text.batch(data, options.seed, index, options.global_batch, options.context)
        optimizer.zero_grad()
        loss = gpt.next_byte_loss(model, torch.from_numpy(tokens[rows]).to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(mean(loss.detach()).item())
        seconds.append(time.perf_counter() - start)
        totals.append(sent())
        done = index + 1
        if emit and (time.monotonic() >= due or done == options.steps):
            due = time.monotonic() + REPORT_EVERY
            speed = options.global_batch * options.context * done / sum(seconds)
            emit(Progress(run, done, options.steps, losses[-1], speed, memory()))
    each = tuple(after - before for before, after in pairwise(totals))
    return Trained(tuple(losses), tuple(seconds), each)


def parameter_digest(model: nn.Module) -> str:
    """SHA-256 of the bits of all parameters, in order."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
