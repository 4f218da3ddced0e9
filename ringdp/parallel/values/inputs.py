"""Lists and dicts that a module is passed, where tensors in them are cast or moved: it gets copies,
and what it puts into these, as blocks do with auxiliary losses, the caller's get (torch's FSDP does
not give it back).

What has nothing to change is passed as it is. Objects are not looked into, dataclasses included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import is_
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ringdp.parallel.guards.copies import Own


def change_inputs(
    module: nn.Module, change: Callable[[Any], Any], own: Own
) -> list[RemovableHandle]:
    """Hooks by which it gets what `change` makes of (args, kwargs)."""
    calls: list[Callable[[], None]] = []  # those under way, innermost last

    def begin(_: nn.Module, *given: Any) -> Any:
        passed = change(given)
        calls.append(give_back(given, passed))
        return passed

    def end(*_: Any) -> None:
        if calls:  # none where a hook before has raised
            calls.pop()()

    return [
        module.register_forward_pre_hook(own(begin), with_kwargs=True),
        module.register_forward_hook(own(end), always_call=True),
    ]


def give_back(given: Any, passed: Any) -> Callable[[], None]:
    """To be called when the module is through. `passed`: `given` with tensors changed, as yet."""
    copies = [*_copies(given, passed)]
    originals = {id(copy): (original, copy) for original, copy in copies}  # held, as are their ids
    lists = [(of, copy, [*copy]) for of, copy in copies if isinstance(of, list)]
    dicts = [(of, copy, dict(copy)) for of, copy in copies if isinstance(of, dict)]

    def original(x: Any) -> Any:
        return originals.get(id(x), (x,))[0]

    def back() -> None:
        for elements, now, before in lists:
            if not _are_same(now, before):
                elements[:] = map(original, now)
        for items, have, had in dicts:
            for key in had.keys() - have.keys():
                items.pop(key, None)
            for key, value in have.items():
                if key not in had or value is not had[key]:
                    items[key] = original(value)

    return back


def _copies(given: Any, passed: Any) -> Iterator[tuple[Any, Any]]:
    """Every part that is another now: (what it was, what it is)."""
    if given is passed:
        return
    yield given, passed
    if isinstance(given, dict):
        for key, value in given.items():
            yield from _copies(value, passed[key])
    elif isinstance(given, list | tuple):
        for old, new in zip(given, passed, strict=True):
            yield from _copies(old, new)


def _are_same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(is_, a, b))
