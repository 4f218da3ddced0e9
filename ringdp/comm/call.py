"""One collective as the user called it: its fingerprint, its file:line, and how to say both.

A fingerprint is one number, since it goes with every message and into every rank's record:

    algorithm << 55 | tag << 24 | root or peer << 14 | collective << 9 | dtype << 4 | op

Ranks whose fingerprints of the same collective differ have made a mistake. Reading one trusts
nothing: a code that stands for nothing is said to be unknown.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from functools import cache
from sys import _getframe
from types import CodeType, FrameType
from typing import get_args

import torch

from ringdp.schedule import ALGORITHMS, Builder, Collective
from ringdp.transport.base import DTYPES, REDUCE_OPS
from ringdp.transport.records import SITE_BYTES, Call

TAGS = 1 << 31  # how many there are: with the codes around them they fit 63 bits
ROOTS = 1 << 10  # and so many ranks may be roots

MESSAGES = ("send", "recv")
COLLECTIVES: tuple[str, ...] = (*get_args(Collective), *MESSAGES, "barrier")
BY = ("direct", "nccl", *sorted({a.name for a in ALGORITHMS} - {"direct"}))  # algorithms
OWN = 255  # a user's, whatever each rank calls it
ANYBODY = ROOTS - 1  # as the peer of a recv
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
REDUCING = frozenset({"all_reduce", "reduce_scatter", "reduce"})


def fingerprint(
    collective: str,
    dtype: torch.dtype,
    op: str,
    root: int,
    algorithm: str | Builder = "direct",
    tag: int = 0,
) -> int:
    """`root`: for send and recv, the peer."""
    by = algorithm if isinstance(algorithm, str) else ""
    return tag << 24 | _but_for_tag(collective, dtype, op, root, by)


@cache
def _but_for_tag(collective: str, dtype: torch.dtype, op: str, root: int, algorithm: str) -> int:
    name = algorithm.partition(":")[0]  # as hierarchical:4
    by = BY.index(name) if name in BY else OWN
    codes = COLLECTIVES.index(collective), DTYPES.index(dtype), REDUCE_OPS.index(op)
    return by << 55 | root << 14 | codes[0] << 9 | codes[1] << 4 | codes[2]


def tag_of(kind: int) -> int:
    return kind >> 24 & TAGS - 1


def peer_of(kind: int) -> int:
    """The root of a collective, or the peer of a message."""
    return kind >> 14 & ROOTS - 1


def other_end(kind: int) -> str:
    """Of a message."""
    return "any rank" if peer_of(kind) == ANYBODY else f"rank {peer_of(kind)}"


def dtype_of(kind: int) -> str:
    return _name(DTYPES, kind >> 4 & 31).removeprefix("torch.")


def collective_of(kind: int) -> str:
    return _name(COLLECTIVES, kind >> 9 & 31)


def named(number: int, kind: int) -> str:
    """`all_reduce #12 (float32, sum)`, `broadcast #13 (int64, root 1, by ring)`."""
    name = collective_of(kind)
    if name == "barrier":
        return f"{name} #{number}"
    parts = [dtype_of(kind)]
    parts += [_name(REDUCE_OPS, kind & 15)] * (name in REDUCING)
    parts += [f"root {peer_of(kind)}"] * (name in ROOTED)
    if name in MESSAGES:
        parts.append(f"{'to' if name == 'send' else 'from'} {other_end(kind)}")
    if by := kind >> 55:  # not the default
        parts.append("by " + ("an algorithm of yours" if by == OWN else _name(BY, by)))
    return f"{name} #{number} ({', '.join(parts)})"


def counted(call: Call, unit: str = "") -> str:
    """`all_reduce #12 (float32, sum) of 100`."""
    number, kind, elements, _ = call
    what = named(number, kind)
    return what if collective_of(kind) == "barrier" else f"{what} of {elements}{unit}"


def told(call: Call, units: Sequence[str] = ()) -> str:
    """`all_reduce #12 (float32, sum) of 100 elements, tag 3 (unit layer.2), at train.py:40`.
    `units`: by tag, where tags are those of an engine's units."""
    tag = tag_of(call[1])
    unit = f" (unit {units[tag]})" if tag < len(units) else ""
    return f"{counted(call, f' elements, tag {tag}{unit}')}, at {place(call[3])}"


def place(site: bytes) -> str:
    """The file:line in it, whatever else another process may have written there."""
    text = site.rstrip(b"\0").decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text) or "an unknown line"


def _name(names: tuple[object, ...], code: int) -> str:
    return str(names[code]) if code < len(names) else f"unknown {code}"


# Note [the user's line]
# Asking a frame for its line walks the function's line table, microseconds in a long function; so
# the text is made once for each place of a call. A place is known by the address of its code object
# plus the offset of its instruction: the instructions lie inside the object, so no two are the same
# (a tuple of both would cost more to make). 0.13 µs a call; of one that was made before, a tenth of
# that: csrc/sites.hpp remembers the last places itself.
_sites: dict[int, bytes] = {}  # by place; empty: not the user's
_site_of = _sites.get
_codes: list[CodeType] = []  # theirs: as long as they live, no other code gets their addresses
_MOST_SITES = 4096  # then all are forgotten: code from exec, again and again, must not pile up
_HERE = os.path.dirname(__file__)
_OURS = (
    os.path.join(_HERE, ""),
    os.path.join(os.path.dirname(_HERE), "parallel", ""),
    os.path.join(os.path.dirname(torch.__file__), ""),
    contextlib.__file__,  # what runs our own context managers
)
NOWHERE = b"a thread without the user's code".ljust(SITE_BYTES, b"\0")


def call_site(depth: int) -> bytes:
    """Where the user called: file:line of the first frame from `depth` up that is not ours.

    SITE_BYTES bytes, zeros at the end; the head of a long path is cut.
    """
    frame = _getframe(depth)
    return _site_of(id(frame.f_code) + frame.f_lasti) or _search(frame)


def _search(frame: FrameType | None) -> bytes:
    while frame is not None:
        if site := line(frame):
            return site
        frame = frame.f_back
    return NOWHERE


def line(frame: FrameType) -> bytes:
    """Where that frame is: as `call_site`, or empty if it is not the user's."""
    site = _site_of(id(frame.f_code) + frame.f_lasti)
    return _learn(frame) if site is None else site


def _learn(frame: FrameType) -> bytes:
    code, site = frame.f_code, b""
    if len(_sites) >= _MOST_SITES:
        _sites.clear()
        _codes.clear()
    if not code.co_filename.startswith((*_OURS, "<frozen ")):
        site = f"{code.co_filename}:{frame.f_lineno}".encode(errors="replace")
        if len(site) > SITE_BYTES:
            site = b"..." + site[3 - SITE_BYTES :]
        site = site.ljust(SITE_BYTES, b"\0")
    _sites[id(code) + frame.f_lasti] = site
    _codes.append(code)
    return site
