"""Which gradients are reduced together: gradients in the order they come -> buckets. Pure.

A bucket takes gradients of one kind (dtype and device) until it reaches its cap; the first bucket
of each kind is small, so that communication starts early. Buckets are in the order in which they
will be complete. Li et al. 2020 (PyTorch Distributed), section 3.2.3.

Note [how large a bucket is]
    Every bucket costs hooks and, over a link, thread switches; the last one overlaps with nothing.
    In shared memory nothing overlaps anyway, since the computing cores move the bytes, so few large
    buckets win, by a little: with torch's 25 MiB a step of a 55 MB model took 1.153 times one
    without communication, with 2 MiB 1.156 times. Over a link as slow as backward, 25 MiB exposed
    59 % of the communication, 2 MiB a fifth, smaller buckets no less (`python -m bench.ddp_step`;
    two cores of an Intel Xeon).
    Tried and dropped: reducing every large gradient in its place, without a bucket. It saves a copy
    in cache, but synchronizes eight times as often: 1.10 against 1.08 (two cores of an AMD EPYC).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

MIB = 1 << 20
CAPS = (1 * MIB, 25 * MIB)  # bytes; see Note [how large a bucket is]
WIRED = (1 * MIB, 2 * MIB)  # the same over a wire


class Gradient(NamedTuple):
    """What decides its bucket."""

    bytes: int
    kind: Hashable
    sparse: bool = False  # a bucket of its own: it has no fixed size


def at_first(gradients: Sequence[Gradient], caps: Sequence[int], *, stays: bool) -> list[list[int]]:
    """The buckets before the order is known: parameters in reverse. `stays`: it never will be;
    then the buckets are torch's, which cuts them from the first parameter on."""
    everything = range(len(gradients))
    if stays:
        return assign(gradients, everything, caps)[::-1]
    return assign(gradients, everything[::-1], caps)


def assign(
    gradients: Sequence[Gradient], order: Iterable[int], caps: Sequence[int]
) -> list[list[int]]:
    """The indices of `gradients`, which come in `order`, by bucket.

    `caps`: bytes of the first bucket of a kind, the second, ...; the last one for all others.
    """
    whole: list[list[int]] = []
    growing: dict[Hashable, list[int]] = {}
    held: dict[Hashable, int] = {}  # bytes
    made: Counter[Hashable] = Counter()  # buckets
    place: dict[int, int] = {}
    for at, index in enumerate(order):
        place[index] = at
        gradient = gradients[index]
        if gradient.sparse:
            whole.append([index])
            continue
        kind = gradient.kind
        growing.setdefault(kind, []).append(index)
        held[kind] = held.get(kind, 0) + gradient.bytes
        if held[kind] >= caps[min(made[kind], len(caps) - 1)]:
            whole.append(growing.pop(kind))
            held[kind] = 0
            made[kind] += 1
    return sorted([*whole, *growing.values()], key=lambda bucket: place[bucket[-1]])
