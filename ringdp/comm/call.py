"""One call of a collective: its fingerprint, the user's file:line, and the text of both in errors.

A fingerprint is one int, since it is part of every message and of every rank's record:

    algorithm << 55 | tag << 24 | root or peer << 14 | collective << 9 | dtype << 4 | op

Ranks that have different fingerprints for one collective number called different collectives. A
fingerprint from another process is not trusted: an invalid code is shown as unknown.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from functools import cache
from types import FrameType
from typing import get_args

import torch

from ringdp.schedule import ALGORITHMS, Builder, Collective
from ringdp.transport.base import DTYPES, REDUCE_OPS
from ringdp.transport.records import SITE_BYTES, Call, learn_sites

TAGS = 1 << 31  # number of tags: the whole fingerprint fits in 63 bits
ROOTS = 1 << 10  # number of values of root or peer

MESSAGES = ("send", "recv")
COLLECTIVES: tuple[str, ...] = (*get_args(Collective), *MESSAGES, "barrier")
ALGORITHM_NAMES = ("direct", "nccl", *sorted({a.name for a in ALGORITHMS} - {"direct"}))
CUSTOM = 255  # any user-defined algorithm: its name may differ between ranks
ANY_RANK = ROOTS - 1  # the peer of a recv from any rank
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
    """Return the fingerprint. For send and recv, `root` is the peer."""
    by = algorithm if isinstance(algorithm, str) else ""
    return tag << 24 | _untagged(collective, dtype, op, root, by)


@cache
def _untagged(collective: str, dtype: torch.dtype, op: str, root: int, algorithm: str) -> int:
    name = algorithm.partition(":")[0]  # without a parameter, as in hierarchical:4
    by = ALGORITHM_NAMES.index(name) if name in ALGORITHM_NAMES else CUSTOM
    codes = COLLECTIVES.index(collective), DTYPES.index(dtype), REDUCE_OPS.index(op)
    return by << 55 | root << 14 | codes[0] << 9 | codes[1] << 4 | codes[2]


def tag_of(kind: int) -> int:
    return kind >> 24 & TAGS - 1


def peer_of(kind: int) -> int:
    """Return the root of a collective, or the peer of a message."""
    return kind >> 14 & ROOTS - 1


def other_end(kind: int) -> str:
    """Describe the peer of a message."""
    return "any rank" if peer_of(kind) == ANY_RANK else f"rank {peer_of(kind)}"


def dtype_of(kind: int) -> str:
    return _name(DTYPES, kind >> 4 & 31).removeprefix("torch.")


def collective_of(kind: int) -> str:
    return _name(COLLECTIVES, kind >> 9 & 31)


def named(number: int, kind: int) -> str:
    """Name a call: `all_reduce #12 (float32, sum)`, `broadcast #13 (int64, root 1, by ring)`."""
    name = collective_of(kind)
    if name == "barrier":
        return f"{name} #{number}"
    parts = [dtype_of(kind)]
    parts += [_name(REDUCE_OPS, kind & 15)] * (name in REDUCING)
    parts += [f"root {peer_of(kind)}"] * (name in ROOTED)
    if name in MESSAGES:
        parts.append(f"{'to' if name == 'send' else 'from'} {other_end(kind)}")
    if by := kind >> 55:  # not the default
        parts.append(
            "by " + ("an algorithm of yours" if by == CUSTOM else _name(ALGORITHM_NAMES, by))
        )
    return f"{name} #{number} ({', '.join(parts)})"


def counted(call: Call, unit: str = "") -> str:
    """Name a call with its length: `all_reduce #12 (float32, sum) of 100`."""
    number, kind, elements, _ = call
    what = named(number, kind)
    return what if collective_of(kind) == "barrier" else f"{what} of {elements}{unit}"


def describe(call: Call, units: Sequence[str] = ()) -> str:
    """Describe a call in full.

    `all_reduce #12 (float32, sum) of 100 elements, tag 3 (unit layer.2), at train.py:40`. `units`
    are the names of an engine's units by tag.
    """
    tag = tag_of(call[1])
    unit = f" (unit {units[tag]})" if tag < len(units) else ""
    return f"{counted(call, f' elements, tag {tag}{unit}')}, at {place(call[3])}"


def place(site: bytes) -> str:
    """Return the file:line in `site`. It may come from another process and hold any bytes."""
    text = site.rstrip(b"\0").decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text) or "an unknown line"


def _name(names: tuple[object, ...], code: int) -> str:
    return str(names[code]) if code < len(names) else f"unknown {code}"


# Note [the user's line]
# frame.f_lineno walks the function's line table, which takes microseconds in a long function. So
# csrc/sites.hpp caches what `line` returns by code object and instruction: `call_site` takes a
# tenth of a microsecond.
_HERE = os.path.dirname(__file__)
_OURS = (
    os.path.join(_HERE, ""),
    os.path.join(os.path.dirname(_HERE), "parallel", ""),
    os.path.join(os.path.dirname(torch.__file__), ""),
    contextlib.__file__,  # runs our own context managers
    "<frozen ",
)
NOWHERE = b"a thread without the user's code".ljust(SITE_BYTES, b"\0")


def line(frame: FrameType) -> bytes:
    """Return the frame's file:line, or b"" if it is not the user's.

    SITE_BYTES bytes, padded with zeros; a long path loses its beginning.
    """
    file = frame.f_code.co_filename
    if file.startswith(_OURS):
        return b""
    site = f"{file}:{frame.f_lineno}".encode(errors="replace")
    if len(site) > SITE_BYTES:
        site = b"..." + site[3 - SITE_BYTES :]
    return site.ljust(SITE_BYTES, b"\0")


learn_sites(line, NOWHERE)
