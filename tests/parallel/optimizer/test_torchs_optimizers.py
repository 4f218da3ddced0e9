"""Every optimizer of torch, with all options of torch's own tests, steps slices as it steps whole
parameters, and its state is whole in a state_dict."""

from __future__ import annotations

import copy

import pytest
import torch

import ringdp
from ringdp import Communicator, UsageError
from tests.equal import equal
from tests.parallel.small import groups, net, step, whole_parameters
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


@on_ranks(2)
def test_slices_are_stepped_as_whole_parameters(comm: Communicator) -> None:
    # Only here, since it loads torch's settings of Hypothesis.
    from torch.testing._internal.common_optimizers import optim_db

    engine = ringdp.shard(net(), stage=3, unit=1_000, comm=comm)  # one unit
    cases = [
        (info.optim_cls, given.kwargs)
        for info in optim_db
        if not info.only_supports_sparse_grads
        for given in info.optim_inputs_func(device="cpu")
    ]
    for kind, options in cases:
        model, twin = engine.model, net()
        with engine.full_parameters(write=True):
            model.load_state_dict(twin.state_dict())
        if kind.__name__ == "LBFGS":
            optimizer = kind(groups(model)[1]["params"], **options)
            with pytest.raises(UsageError, match="LBFGS looks at all parameters at once"):
                step(model, optimizer, 0)
            continue
        first = kind is torch.optim.Muon  # which refuses biases
        exact, optimizer = (kind(groups(m)[first:], **options) for m in (twin, model))
        step(twin, exact, 0, 1)
        step(model, optimizer, 0, 1)
        with engine.full_parameters():
            state = copy.deepcopy(optimizer.state_dict())
        fresh = kind(groups(model)[first:], **options)
        fresh.load_state_dict(state)
        torch.testing.assert_close(state, exact.state_dict(), rtol=0, atol=0)
        step(twin, exact, 2)
        step(model, fresh, 2)
        assert equal(whole_parameters(engine), twin.parameters()), (kind, options)
    engine.close()
