"""Lists and dicts that a module is passed, where tensors in them are cast: it gets copies, and what
it puts into these, as blocks do with auxiliary losses, the caller's get (torch's FSDP drops it).

What has nothing to cast is passed as it is. Objects are not looked into, dataclasses included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import is_
from typing import Any


def give_back(given: Any, passed: Any) -> Callable[[], None]:
    """To be called when the module is through. `passed`: `given` with tensors cast, as yet."""
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
