"""Load: every rank reads the elements that it keeps, whichever rank wrote them.

First every rank lists all reads and checks them: dtypes, sizes, and that the files are complete.
Only then is anything changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringdp.errors import CheckpointError
from ringdp.parallel import nested
from ringdp.parallel.checkpoint import extra
from ringdp.parallel.checkpoint.index import Entry, Index, file_of, read_index
from ringdp.parallel.checkpoint.plan import Read, planned
from ringdp.parallel.checkpoint.spans import (
    Optimizers,
    groups_in,
    optimizers_given,
    pieces,
)
from ringdp.parallel.checkpoint.tensorfile import TensorFile, dtype_of
from ringdp.parallel.checkpoint.together import together
from ringdp.parallel.engine import Engine
from ringdp.parallel.optimizer import state as optim_state

Files = Callable[[int], TensorFile]  # by the rank that wrote it


def load(
    path: str | os.PathLike[str],
    engine: Engine,
    optimizer: Optimizers = None,
) -> dict[str, Any]:
    """Load what `save` wrote: parameters, buffers, modules' extra state, and the optimizer's state
    and options, or those of a list in the order of the save's. Collective. Returns the
    checkpoint's `extra`.

    The number of ranks, stage, units and precision may differ from the save's; values are cast.
    Optimizer state that only some ranks had needs as many ranks again, in stage 1, 2 or 3. If ranks
    had different single values, each takes the first one in its part. Raises CheckpointError, on
    every rank and with nothing changed, if the checkpoint is of another model or optimizer, or if a
    rank cannot read its part.
    """
    optimizers = optimizers_given("load", engine, optimizer)
    path, found = Path(path), pieces(engine)
    with together(engine.comm, "nothing was loaded"):
        index = read_index(path)
        plan = planned(index, engine, optimizers, found)
        file = cache(lambda rank: TensorFile(file_of(path / index.directory, rank)))
        for read in plan.reads:
            _check(read, index.tensors[read.key], file)
    with together(engine.comm, "the checkpoint was loaded in part only"):
        if optimizers:
            _set_options(optimizers, index)
        for one in optimizers:
            optim_state.clear(one)
            engine.take(one)
        with torch.no_grad():
            for read in plan.reads:
                read.put(_values(read, index.tensors[read.key], file))
        for one, piece, state in plan.kept:
            if state:
                one.state[piece.parameter] = nested.deep(state)
        for name, module in extra.modules(engine.model).items():
            module.set_extra_state(extra.unpack(index.modules[name], plan.states.__getitem__))
    return index.extra


def _check(read: Read, entry: Entry, file: Files) -> None:
    """Raise CheckpointError unless all files have what the index says of the elements."""
    for part in entry.within(read.begin, read.end):
        there, (_, elements) = file(part.rank), entry.elements(0, part.end - part.begin)
        said = dtype_of(entry.dtype), elements
        if (found := there.dtype_and_elements(read.key)) != said:
            raise CheckpointError(f"{there.path} has {found} of {read.key}, not {said}")


@torch.inference_mode(False)  # what it makes may be the optimizer's state
def _values(read: Read, entry: Entry, file: Files) -> Tensor:
    values = []
    for part in entry.within(read.begin, read.end):
        begin, end = max(read.begin, part.begin), min(read.end, part.end)
        span = entry.elements(begin - part.begin, end - part.begin)
        values.append(file(part.rank).read(read.key, *span))
    if not values:
        return torch.empty(0, dtype=dtype_of(entry.dtype), device="cpu")
    return torch.cat(values) if len(values) > 1 else values[0]


def _set_options(optimizers: Sequence[torch.optim.Optimizer], index: Index) -> None:
    for group, saved in zip(groups_in(optimizers), index.groups or [], strict=True):
        for option, value in saved["options"].items():
            if option == "param_names":  # in the saved order
                continue
            group[option] = _set(group.get(option), value)


def _set(here: Any, given: Any) -> Any:
    """The saved option in place of `here`, whose tensors are kept, and filled."""
    if isinstance(here, Tensor):
        return here.fill_(given)
    if isinstance(given, list) and not isinstance(here, list):  # JSON has no tuples
        alike = isinstance(here, tuple) and len(here) == len(given)
        return tuple(map(_set, here if alike else repeat(None), given))
    return given
