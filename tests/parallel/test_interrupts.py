"""Ctrl-C in a forward, a gather, a reduction or a backward: the next iteration is right, and no
memory is lost or freed too early."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor

import ringdp
from ringdp import Communicator, Work
from ringdp.parallel.state import State
from tests.parallel.small import assert_gradients, loss, net
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


class Interrupted:
    """A work whose first wait is ended by the user."""

    def __init__(self, work: Work) -> None:
        self.work, self.waits = work, 0

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> None:
        self.waits += 1
        if self.waits == 1:
            raise KeyboardInterrupt
        self.work.wait()


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_an_interrupted_wait_leaves_no_reduction_in_flight(comm: Communicator, stage: int) -> None:
    """Its bucket would be freed while other ranks and threads still write to it."""
    model, twin = net(), net()
    engine = ringdp.shard(model, stage=stage, comm=comm)
    kind = engine.stage.reduction
    start, works = getattr(engine.reducing.comm, kind), list[Interrupted]()

    def first(*args: Any, **named: Any) -> Interrupted:
        delattr(engine.reducing.comm, kind)
        works.append(Interrupted(start(*args, **named)))
        return works[0]

    setattr(engine.reducing.comm, kind, first)
    with pytest.raises(KeyboardInterrupt):
        loss(model).backward()
    for one in (model, twin):
        loss(one, 1).backward()
    assert works[0].waits == 2
    assert_gradients(engine, twin)
    assert engine.ledger.now["buckets"] == 0
    engine.close()


@on_ranks(2)
def test_the_memory_of_an_interrupted_gather_is_kept_and_counted_once(comm: Communicator) -> None:
    """The gather may still write to it."""
    model, twin = net(), net()
    engine = ringdp.shard(model, stage=3, comm=comm)
    loss(model).backward()
    model.zero_grad()
    start, filled = engine.gathering.comm.all_gather, list[int]()

    def interrupted(output: Tensor, *args: Any, **named: Any) -> Work:
        filled.append(output.data_ptr())
        work = start(output, *args, **named)
        if len(filled) == 1:
            raise KeyboardInterrupt
        return work

    engine.gathering.comm.all_gather = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        loss(model)
    for one in (model, twin):
        loss(one).backward()
    assert filled[1] == filled[0]
    assert_gradients(engine, twin)
    assert engine.ledger.now["gathered"] == 0
    engine.close()


@on_ranks(2)
def test_an_interrupted_forward_leaves_no_unit_in_use(comm: Communicator) -> None:
    """Such a unit would stay gathered, and count as around all that later forwards call."""
    model = net()
    engine = ringdp.shard(model, stage=3, comm=comm)

    def interrupt(*_: object) -> None:
        handle.remove()
        raise KeyboardInterrupt

    handle = model[-1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loss(model)
    value = loss(model)
    root, *inner = engine.units
    assert all(unit.state is not State.UNSHARDED for unit in inner)
    assert engine.gathering.callers == [set(), *({root.index} for _ in inner)]
    value.backward()
    engine.close()


@on_ranks(4)
def test_an_interrupted_copy_of_a_piece_leaves_the_unit_whole(comm: Communicator) -> None:
    """Otherwise its parameters would be slices in all later forwards."""
    model, twin = net(), net()
    engine = ringdp.shard(model, stage=3, comm=comm, reshard_size=2)
    near = engine.ledger.ranks.near
    assert near is not None

    def interrupt(*_: object, **__: object) -> Tensor:
        del near.empty
        raise KeyboardInterrupt

    near.empty = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        loss(model)
    for one in (model, twin):
        loss(one).backward()
    assert_gradients(engine, twin)
    assert engine.ledger.now["gathered"] == 0
    engine.close()


class InterruptedOnce(OrderedDict[int, Any]):
    """Hooks of a parameter: Ctrl-C comes before the next one is set, if `armed`."""

    armed = False

    def __setitem__(self, key: int, hook: Any) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt
        super().__setitem__(key, hook)


@pytest.mark.parametrize("precision", [None, ringdp.Precision(torch.float64)])
@on_ranks(2)
def test_ctrl_c_while_hooks_are_put_in_order_loses_none(
    comm: Communicator, precision: ringdp.Precision | None
) -> None:
    model, twin = net(), net()
    engine = ringdp.shard(model, stage=2, precision=precision, comm=comm)
    p = engine.units[1].computed[0]
    hooks = InterruptedOnce(p._post_accumulate_grad_hooks)
    hooks.armed = True
    p._post_accumulate_grad_hooks = hooks
    with pytest.raises(KeyboardInterrupt):
        loss(model).backward()
    for one in (model, twin):
        loss(one).backward()
    assert_gradients(engine, twin)
    engine.close()
