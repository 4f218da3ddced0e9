"""Which gradients are reduced together: gradients in the order they come -> buckets. Pure.

A bucket takes gradients of one kind (dtype and device) until it holds its cap or more: the first of
each kind a small one, so that communication starts early. Buckets come in the order in which they
will be whole. Li et al. 2020 (PyTorch Distributed), section 3.2.3.

Note [how large a bucket is]
    Every bucket costs its hooks, and over a link changes of threads; the last one has nothing to
    hide behind. Ranks that share memory hide nothing anyway, since the cores that compute move the
    bytes, so that few large buckets win, by a little: with torch's 25 MiB a step of a 55 MB model
    took 1.153 of one without communication, with 2 MiB 1.156. Over a link as slow as backward 25
    MiB left 59 % of the communication exposed, 2 MiB a fifth, smaller ones no less
    (`python -m bench.ddp_step`; two cores of an Intel Xeon).
    Not kept: to reduce every large gradient in its place, without a bucket. It saves a copy of
    hot memory, and meets the others eight times as often: 1.10 where this took 1.08 (two cores of
    an AMD EPYC).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

MIB = 1 << 20
CAPS = (1 * MIB, 25 * MIB)  # bytes; see Note [how large a bucket is]
WIRED = (1 * MIB, 2 * MIB)  # the same over a wire


class Gradient(NamedTuple):
    """What a bucket needs to know of one."""

    bytes: int
    kind: Hashable
    sparse: bool = False  # goes alone: it has no fixed size


def at_first(gradients: Sequence[Gradient], caps: Sequence[int], *, stays: bool) -> list[list[int]]:
    """Before their order is known: from the last to the first. `stays`: it never will be; then
    buckets are torch's, which cuts them from the first to the last."""
    everything = range(len(gradients))
    if stays:
        return assign(gradients, everything, caps)[::-1]
    return assign(gradients, everything[::-1], caps)


def assign(
    gradients: Sequence[Gradient], order: Iterable[int], caps: Sequence[int]
) -> list[list[int]]:
    """Indices of `gradients`, which become ready in `order`, by bucket.

    `caps`: bytes of the first bucket of a kind, the second, ...; the last holds for all behind it.
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
