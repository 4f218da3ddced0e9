"""Gradients that are referenced while the next ones are computed keep their values, in all
stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ringdp
from ringdp import Communicator, Offload
from tests.equal import equal
from tests.parallel.small import COMPUTE_IN_FLOAT64, REFERENCES, loss, net
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("stage", "options"),
    [(stage, {}) for stage in range(4)]
    + [(stage, {"precision": COMPUTE_IN_FLOAT64}) for stage in (0, 1, 3)]
    + [(stage, {"offload": Offload(optimizer=True)}) for stage in (1, 3)],
)
@on_ranks(2)
def test_gradients_that_are_referenced_keep_their_values(
    comm: Communicator, stage: int, options: dict[str, Any]
) -> None:
    model = net()
    engine = ringdp.shard(model, stage=stage, unit=torch.nn.Linear, comm=comm, **options)
    parameters = list(model.parameters())

    def gradients(seed: int) -> list[Tensor]:
        loss(model, seed).backward()
        return [p.grad.clone() for p in parameters]

    def clear_some() -> None:
        for p in parameters[::2]:
            p.grad = None

    first = gradients(0)
    model.zero_grad()
    second = gradients(1)
    for hold in REFERENCES:
        for clear in (model.zero_grad, clear_some):
            model.zero_grad()
            assert equal(gradients(0), first)
            kept = [hold(p) for p in parameters[::2]]
            copied = [torch.as_tensor(t).clone() for t in kept]
            clear()
            expected = list(second)
            if clear is clear_some:
                expected[1::2] = map(torch.add, first[1::2], second[1::2])
            torch.testing.assert_close(gradients(1), expected)
            assert equal(map(torch.as_tensor, kept), copied)
            del kept
    memory = [u.gradients.reduced.data_ptr() for u in engine.units]
    for seed in range(3):  # without such references no other memory is allocated
        (model.zero_grad if seed else clear_some)()
        gradients(seed)
        assert [u.gradients.reduced.data_ptr() for u in engine.units] == memory
    assert engine.ledger.now["gradients"] == engine.memory_formula().gradients
    engine.close()
