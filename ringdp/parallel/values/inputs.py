"""Casts and moves a module's inputs; what the module adds to a list or dict reaches the caller's.

The module gets copies of lists and dicts in which tensors are changed. Blocks put auxiliary losses
into them, for example; afterwards the originals are updated (torch's FSDP does not do that). Inputs
without changes are passed on as they are. Dataclasses and other objects are not updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.utils import _recursive_to
from torch.nn.modules.batchnorm import _BatchNorm

from ringdp.errors import UsageError
from ringdp.parallel.guards.copies import AddHook
from ringdp.parallel.precision import Precisions, kept, of_modules
from ringdp.parallel.units import lacks_forward
from ringdp.parallel.values.tensor_tree import map_tensors


def moved(given: Any, device: torch.device) -> Any:
    """The same structure with every tensor on `device`; unchanged parts are not copied."""
    return _recursive_to(given, device, False)[0]


def move_inputs(model: nn.Module, device: torch.device, add_hook: AddHook) -> None:
    """Move the model's inputs to `device`, if that is a GPU."""
    for module in called(model) if device.type != "cpu" else ():
        change_inputs(module, lambda given: moved(given, device), add_hook)


def called(model: nn.Module) -> list[nn.Module]:
    """The modules whose inputs and outputs are the model's."""
    return [*model] if isinstance(model, nn.ModuleList) and lacks_forward(model) else [model]


def cast_at(
    model: nn.Module,
    chosen: Iterable[nn.Module],
    given: Precisions,
    active: Callable[[], bool],
    add_hook: AddHook,
) -> None:
    """Cast inputs and outputs while `active`. `chosen`: as units, the model among them."""
    of = of_modules(model, given)
    keeps, within = kept(of)
    where = {
        False: (),
        "model": called(model),
        True: {*chosen, *(m for at in given for m in called(at))},
    }
    for module, precision in of.items():
        if module not in within and module in where[precision.cast_inputs]:
            _cast_around(module, precision.param, None, active, add_hook)
    for module in keeps:
        if (first := next(module.parameters(), None)) is not None:
            _cast_around(module, first.dtype, of[module].param, active, add_hook)
    for at, precision in given.items():
        for module in called(at):
            _cast_around(module, None, precision.output, active, add_hook)
    for name, module in model.named_modules():
        is_torchs = type(module).forward is _BatchNorm.forward  # another may cast what it uses
        if is_torchs and of[module].param is not None and module not in within:
            add_hook(module.register_forward_pre_hook, partial(_check_batch_norm, name))


def _cast_around(
    module: nn.Module,
    inputs: torch.dtype | None,
    output: torch.dtype | None,
    active: Callable[[], bool],
    add_hook: AddHook,
) -> None:
    """Cast its floating inputs and outputs to these dtypes, if given, while `active`."""
    if inputs is not None:
        change_inputs(module, lambda x: cast(x, inputs) if active() else x, add_hook)
    if output is not None:
        add_hook(
            module.register_forward_hook,
            lambda _module, _inputs, out: cast(out, output) if active() else out,
        )


def _check_batch_norm(name: str, norm: Any, _: object) -> None:
    """Raise UsageError where torch would say no more than two dtypes."""
    weight, mean = norm.weight, norm.running_mean
    if weight is not None and mean is not None and weight.dtype != mean.dtype:
        raise UsageError(
            f"batch norm {name} computes in {weight.dtype}, and its buffers are {mean.dtype}: cast "
            "its running mean and variance, name it in keep_fp32 of ringdp.shard's Precision, or "
            "fully_shard it by itself, without a param_dtype"
        )


def cast(values: Any, dtype: torch.dtype) -> Any:
    """The same structure with every floating tensor in that dtype; unchanged parts are not copied.

    Raises UsageError for a container that contains itself.
    """

    def differs(t: Tensor) -> bool:
        return t.is_floating_point() and t.dtype != dtype

    try:
        return map_tensors(lambda t: t.to(dtype), values, which=differs)
    except RecursionError:
        raise UsageError(
            "a module takes or returns containers within one another without end, as a dict that "
            f"holds itself: their tensors cannot be cast to {dtype}; allowed: none that does"
        ) from None


def change_inputs(module: nn.Module, change: Callable[[Any], Any], add_hook: AddHook) -> None:
    """Call the module with `change((args, kwargs))`."""
    calls: list[Callable[[], None]] = []  # running calls, innermost last

    def begin(_: nn.Module, *given: Any) -> Any:
        passed = change(given)
        calls.append(give_back(given, passed))
        return passed

    def end(*_: Any) -> None:
        if calls:  # none if an earlier hook raised
            calls.pop()()

    add_hook(module.register_forward_pre_hook, begin, with_kwargs=True)
    add_hook(module.register_forward_hook, end, always_call=True)


def give_back(given: Any, passed: Any) -> Callable[[], None]:
    """Returns a function that updates the containers in `given`, to be called after the module.
    `passed`: the changed copy of `given`, before the module gets it."""
    copies = [*_copies(given, passed)]
    originals = {id(copy): (original, copy) for original, copy in copies}  # held, as ids are reused
    lists = [(of, copy, [*copy]) for of, copy in copies if isinstance(of, list)]
    dicts = [(of, copy, dict(copy)) for of, copy in copies if isinstance(of, dict)]

    def original(x: Any) -> Any:
        return originals.get(id(x), (x,))[0]

    def back() -> None:
        for elements, now, before in lists:
            if len(now) != len(before) or not all(map(is_, now, before)):
                elements[:] = map(original, now)
        for items, have, had in dicts:
            for key in had.keys() - have.keys():
                items.pop(key, None)
            for key, value in have.items():
                if key not in had or value is not had[key]:
                    items[key] = original(value)

    return back


def _copies(given: Any, passed: Any) -> Iterator[tuple[Any, Any]]:
    """(original, copy) of every part that was copied."""
    if given is passed:
        return
    yield given, passed
    if isinstance(given, dict):
        for key, value in given.items():
            yield from _copies(value, passed[key])
    elif isinstance(given, list | tuple):
        for old, new in zip(given, passed, strict=True):
            yield from _copies(old, new)
