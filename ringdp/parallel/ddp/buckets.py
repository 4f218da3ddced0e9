"""The buckets of one DDP: which there are, at first and once the order of gradients is known."""

from __future__ import annotations

from collections.abc import Sequence

from ringdp.comm import Communicator
from ringdp.parallel.ddp.bucket import Bucket, FlatBucket
from ringdp.parallel.ddp.bucketing import Gradient, assign, at_first
from ringdp.parallel.ddp.settings import Settings, Trainable
from ringdp.parallel.ddp.sparse import SparseBucket

Layout = list[list[int]]  # parameters by bucket


def layout_of(
    parameters: Sequence[Trainable], settings: Settings, order: Sequence[int] = ()
) -> Layout:
    """`order`: that in which gradients come, once it is known."""
    facts = [
        Gradient(p.numel() * p.element_size(), (p.dtype, p.device), sparse)
        for _, p, sparse in parameters
    ]
    if order:
        return assign(facts, order, settings.caps)
    return at_first(facts, settings.caps, stays=settings.seeks_unused)


def buckets_of(
    parameters: Sequence[Trainable], settings: Settings, layout: Layout, comm: Communicator
) -> list[Bucket]:
    made: list[Bucket] = []
    for index, members in enumerate(layout):
        first = parameters[members[0]]
        if first.sparse:
            made.append(SparseBucket(index, first.name, first.parameter, comm))
            continue
        shared = settings.gradient_as_bucket_view
        made.append(
            FlatBucket(index, [parameters[i].parameter for i in members], comm, shared=shared)
        )
    return made
