"""Misuse of a sharded model or its optimizer raises an error that says what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Torchs
from torch.optim.swa_utils import AveragedModel

import ringdp
from ringdp import Communicator, Precision, UsageError
from tests.equal import equal
from tests.parallel.ddp.cases import gloo
from tests.parallel.small import (
    COMPUTE_IN_FLOAT64,
    WIDTH,
    assert_equal,
    batch,
    loss,
    net,
    whole_parameters,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


class Prodigy(torch.optim.SGD):
    """Has the name of one that sums over all parameters."""


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_full_parameters_within_a_forward_is_named_where_a_slice_is_used(
    comm: Communicator, stage: int
) -> None:
    model = net()
    engine = ringdp.shard(model, stage=stage, comm=comm)

    def hook(*_: object) -> None:
        with engine.full_parameters():
            pass

    model[1].register_forward_pre_hook(hook)
    with pytest.raises(UsageError, match=r"full_parameters\(\) that ended within it"):
        model(batch())
    engine.close()


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_unsupported_uses_are_refused(comm: Communicator, stage: int) -> None:
    def refused(act: Callable[[], object], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            act()

    model = net()
    around = nn.Sequential(model, nn.Linear(1, 1))
    engine = ringdp.shard(model, stage=stage, comm=comm)
    refused(lambda: ringdp.shard(model[1], stage=stage, comm=comm), "this model is sharded already")
    refused(
        lambda: ringdp.shard(around, stage=stage, comm=comm),
        "module 0 of this model is sharded already",
    )
    refused(
        lambda: ringdp.DistributedDataParallel(model, process_group=comm),
        "this model is sharded already",
    )
    shares = nn.Linear(WIDTH, WIDTH)
    shares.bias = model[1][0].bias
    refused(lambda: ringdp.shard(shares, stage=stage, comm=comm), "bias is sharded already")
    if stage:
        optimizer = torch.optim.LBFGS(model.parameters())
        refused(lambda: optimizer.step(lambda: loss(model)), "LBFGS looks at all parameters")
    for kind, told, wrong, message in (
        (Prodigy, "fsdp_in_use", False, "Prodigy without fsdp_in_use=True looks at all parameters"),
        (torch.optim.SGD, "max_grad_norm", 1.0, "SGD with a max_grad_norm looks at all parameters"),
    ):
        optimizer = kind([{"params": [p], told: wrong} for p in model.parameters()])
        if stage:
            refused(optimizer.step, message)
        for group in optimizer.param_groups:
            group[told] = not wrong
        optimizer.step()
    model.double()
    if not stage:
        with torch.no_grad():
            model(batch(0).double())
    refused(
        lambda: model(batch(0).double()),
        r"has become torch\.float64.* in the sharded model it is torch\.float32",
    )
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("wrong", ["dtype", "shape"])
@on_ranks(2)
def test_full_parameters_writes_nothing_if_a_parameter_does_not_fit(
    comm: Communicator, wrong: str, stage: int
) -> None:
    model = net()
    engine = ringdp.shard(model, stage=stage, comm=comm)
    before = whole_parameters(engine)

    def write() -> None:
        with engine.full_parameters(write=True):
            *others, last = model.parameters()
            for p in others:
                p.data.zero_()
            last.data = last.data.double() if wrong == "dtype" else last.data[:1]

    with pytest.raises(UsageError, match=r"has become torch\..*in the sharded model it is"):
        write()
    assert equal(whole_parameters(engine), before)
    engine.close()


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_parameters_are_not_swapped_for_others(comm: Communicator, stage: int) -> None:
    """The others would have no hooks: their gradients would not be reduced."""
    model, swaps = net(), torch.__future__.get_swap_module_params_on_conversion()
    engine = ringdp.shard(model, stage=stage, comm=comm)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        swapped = pytest.raises(RuntimeError, match=r'swapping the parameter named "0\.0\.weight"')
        with engine.full_parameters(write=True), swapped:
            model.load_state_dict(net(1).state_dict())
        with pytest.raises(RuntimeError, match=r"swap Linear\.weight"):
            model.to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        engine.close()


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_an_optimizer_of_temporary_parameters_is_refused(comm: Communicator, stage: int) -> None:
    """Where modules compute with other tensors, such an optimizer would train nothing."""
    model = net()
    engine = ringdp.shard(
        model, stage=stage, unit=1 << 40, precision=COMPUTE_IN_FLOAT64, comm=comm
    )  # one unit
    value = loss(model)
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    value.backward()
    with pytest.raises(UsageError, match="made between a forward and the end of its backward"):
        late.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    twin = net()
    loss(twin).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert_equal(engine, twin)
    engine.close()


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_a_loss_of_parameters_outside_a_forward_is_refused(comm: Communicator, stage: int) -> None:
    """Where modules compute with other tensors, these gradients would be lost."""
    model = net()
    parameters = list(model.parameters())
    engine = ringdp.shard(model, stage=stage, precision=COMPUTE_IN_FLOAT64, comm=comm)
    value = loss(model)
    with pytest.raises(UsageError, match=r"\.0\.(weight|bias)"):
        (value + sum(p.square().sum() for p in parameters)).backward()
    model.zero_grad()
    loss(model).backward()
    engine.close()


@on_ranks(2)
def test_a_model_wrapped_in_ddp_is_refused(comm: Communicator) -> None:
    """Nothing would be trained in stage 0 in torch's, and the others would end the process."""
    gloo()
    for wrap in (nn.parallel.DistributedDataParallel, ringdp.DistributedDataParallel):
        model = wrap(net())
        with pytest.raises(UsageError, match="the model is a DistributedDataParallel, which red"):
            ringdp.shard(model, stage=0, comm=comm)
        with pytest.raises(UsageError, match="module 0 is a DistributedDataParallel"):
            ringdp.shard(nn.Sequential(model), stage=3, comm=comm)
        frozen = model.requires_grad_(False)  # as a teacher, which reduces nothing
        ringdp.shard(nn.Sequential(frozen, net()), stage=3, comm=comm).close()


@on_ranks(2)
def test_slices_among_whole_tensors_are_told(comm: Communicator) -> None:
    """torch's error is about shapes alone."""
    model = net()
    average = AveragedModel(model)
    engine = ringdp.shard(model, stage=1, comm=comm)
    with pytest.raises(RuntimeError, match="size of tensor") as told:
        average.update_parameters(model)
    assert "whole within full_parameters()" in told.value.__notes__[0]
    engine.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda model: ringdp.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: ringdp.LossScaler(model),
        lambda model: ringdp.save("checkpoint", model),
        lambda model: ringdp.load("checkpoint", model),
        lambda model: ringdp.export("model.safetensors", model),
    ],
    ids=["clip_grad_norm_", "LossScaler", "save", "load", "export"],
)
def test_a_model_in_place_of_an_engine_is_refused(call):
    with pytest.raises(UsageError, match=r"allowed: what ringdp\.shard returns"):
        call(nn.Linear(2, 2))


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_different_models_on_the_ranks_are_refused(comm: Communicator, stage: int) -> None:
    """Otherwise they would train a model that no rank has."""
    wide = nn.Linear(8, 8 + comm.rank)  # both have the same size with padding
    named = nn.ParameterDict([(name, torch.ones(3)) for name in ("ab", "ba")[comm.rank]])
    alike = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    models: list[tuple[nn.Module, Any, str]] = [
        (wide, None, r"'weight' with sizes \[9, 8\] on rank 1"),
        (named, None, "'b' with name b on rank 1"),
        (alike, lambda m: m is alike[comm.rank], "'0.weight' with unit root on rank 1"),
    ]
    for model, unit, what in models:
        message = f"(?s)shard expects same model across all ranks.*{what}"
        with pytest.raises(ringdp.ModelError, match=message):
            ringdp.shard(model, stage=stage, unit=unit, comm=comm)


@on_ranks(2)
def test_different_stages_on_the_ranks_are_refused(comm: Communicator) -> None:
    """Otherwise the ranks would wait for each other until the timeout. Rank 0's stage alone could
    not offload."""
    offload = ringdp.Offload(optimizer=True)
    with pytest.raises(ringdp.ModelError, match="'weight' with stage 1 on rank 1"):
        ringdp.shard(nn.Linear(8, 8), stage=comm.rank, offload=offload, comm=comm)


@on_ranks(2)
def test_different_units_to_keep_on_the_ranks_are_refused(comm: Communicator) -> None:
    """Also where one rank's rule matches none, by which it alone would raise."""
    model = net()
    with pytest.raises(ringdp.ModelError, match=r"keep True on rank 1, .* with keep False"):
        ringdp.shard(model, stage=3, keep=lambda m: comm.rank == 1 and m is model[0], comm=comm)


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_gradients_and_states_from_before_shard_are_used(comm: Communicator, stage: int) -> None:
    model, twin = net(), net()
    early = torch.optim.Adam(model.parameters())
    loss(model).backward()
    early.step()
    twin.load_state_dict(model.state_dict())
    engine = ringdp.shard(model, stage=stage, comm=comm)
    late = torch.optim.Adam(twin.parameters())
    late.load_state_dict(deepcopy(early.state_dict()))
    for m, optimizer in ((model, early), (twin, late)):
        loss(m).backward()
        optimizer.step()
    assert_equal(engine, twin)
    engine.close()


class KeepsInList(nn.Module):
    """Its second layer uses the first one's weight through a list, where it is not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.kept = [self.first.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.first(x), self.kept[0])


@pytest.mark.parametrize("stage", range(4))
@on_ranks(1)
def test_a_weight_kept_in_a_list_is_refused(comm: Communicator, stage: int) -> None:
    engine = ringdp.shard(
        model := KeepsInList(), stage=stage, precision=COMPUTE_IN_FLOAT64, comm=comm
    )
    why = "as it is at rest, where it computes in another dtype" if stage == 0 else "outside"
    for graph in (True, False):
        with torch.set_grad_enabled(graph), pytest.raises(UsageError, match=why) as error:
            model(batch(0))
        assert str(error.value).startswith("first.weight is used")
    engine.close()


class Reads(nn.Module):
    """Uses the weight of a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.read = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.first(x), self.read.weight)


@pytest.mark.parametrize(
    ("stage", "precision"), [*((stage, COMPUTE_IN_FLOAT64) for stage in range(4)), (3, None)]
)
@on_ranks(1)
def test_a_weight_of_a_unit_that_is_never_called_is_told(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    model = Reads()
    engine = ringdp.shard(model, stage=stage, unit=nn.Linear, precision=precision, comm=comm)
    for graph in (True, False):
        with (
            torch.set_grad_enabled(graph),
            pytest.raises(UsageError, match=r"read.weight .* let both lie in one unit"),
        ):
            model(batch(0))
    engine.close()


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_a_sharded_model_in_torchs_ddp_is_refused(comm: Communicator, stage: int) -> None:
    """Slices of one size on all ranks would pass DDP's own check."""

    def refused(act: Callable[[], object], what: str) -> None:
        with pytest.raises(UsageError, match=f"{what} is in torch's DistributedDataParallel"):
            act()

    gloo()
    part, x = nn.Linear(8, 8, bias=False), torch.ones(2, 8)  # of slices of one size
    engine = ringdp.shard(part, stage=stage, comm=comm)
    refused(lambda: Torchs(part), "a sharded model")
    around = Torchs(nn.Sequential(part))
    refused(lambda: around(x), "a module with a sharded one within it")
    with engine.full_parameters():
        Torchs(deepcopy(part))(x).sum().backward()
        engine.close()
    Torchs(part)
