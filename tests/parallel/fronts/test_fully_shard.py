"""Several calls of `fully_shard` on one model: options, outputs, and what is refused. (Training is
in test_fronts.)"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from ringdp import CommunicationError, Communicator, ModelError, Offload, UsageError
from ringdp.parallel import fronts
from ringdp.parallel.fronts.fsdp_module import FSDPModule
from tests.parallel.fronts.scripts import ours_and_torchs
from tests.parallel.small import assert_trains, batch, loss, net
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

BF16 = torch.bfloat16


@on_ranks(2)
def test_options_of_several_calls_are_combined_or_refused(comm: Communicator) -> None:
    def shard(first: Any, second: Any, whole: Any) -> Any:
        model = net()
        for block, options in ((model[1], first), (model[2], second)):
            fronts.fully_shard(block, **{"comm": comm} | options)
        try:
            fronts.fully_shard(model, comm=comm, **whole)
            return model.engine
        finally:
            for module in (model, model[1], model[2]):
                if isinstance(module, FSDPModule):
                    module.engine.close()

    frees, keeps, given = ({"reshard_after_forward": value} for value in (True, False, None))
    low = {"mp_policy": MixedPrecisionPolicy(BF16)}
    out = {"mp_policy": MixedPrecisionPolicy(BF16, output_dtype=torch.float32)}
    offloads = {"offload_policy": CPUOffloadPolicy()}
    for first, second, whole, stage in (
        (given, given, given, 3),
        (given, frees, keeps, 3),  # torch's default, made explicit
        (frees, frees, frees, 3),
        (keeps, keeps, keeps, 2),
        (keeps, keeps, given, 2),
        (low, low, out, 3),
        (out, out, low, 3),
        ({"offload_policy": OffloadPolicy()}, {"mp_policy": MixedPrecisionPolicy()}, given, 3),
        (keeps, frees, given, 3),
        (keeps, keeps, frees, 3),
    ):
        engine = shard(first, second, whole)
        assert engine.stage.number == stage, (first, second, whole)
        if low in (first, whole):
            assert engine.units[1].dtypes == (torch.float32, BF16, torch.float32)
    pageable = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    assert shard(pageable, pageable, pageable).ledger.offload == Offload(True, True, pin=False)
    message = r"offload_policy of module '2' was None, and is 'CPUOffloadPolicy\(pin_memory=True\)'"
    with pytest.raises(UsageError, match=message):
        shard(offloads, {}, offloads)
    message = r"within were sharded over 1 ranks; of the model's 2, these are among them: \[0\]"
    with comm.split(comm.rank) as alone, pytest.raises(UsageError, match=message):
        shard({}, {"comm": alone}, {})

    model: Any = net()
    for module, options in ((model[1], frees), (model, frees), (model, keeps | low)):
        fronts.fully_shard(module, comm=comm, **options)  # new options are accepted after a close
        if module is model:
            assert model.engine.stage.number == (2 if options is not frees else 3)
            with model.engine.full_parameters():
                model.engine.close()


def output_dtypes(shards: Any) -> list[torch.dtype]:
    """Of each module within the model's forward, of the model, and of a module by itself."""
    model, found = net(), list[torch.dtype]()
    for block, dtype in ((model[0], torch.float64), (model[1], None), (model[2], torch.float32)):
        shards(block, mp_policy=MixedPrecisionPolicy(BF16, output_dtype=dtype))
    shards(model, mp_policy=MixedPrecisionPolicy(BF16, output_dtype=torch.float16))
    for block in model:
        block.register_forward_hook(lambda *given: found.append(given[2].dtype))
    found.append(model(batch()).dtype)
    model[0](batch()).sum().backward()
    if hasattr(model, "engine"):
        model.engine.close()
    return found


@on_ranks(2)
def test_each_module_casts_its_outputs_as_with_torchs(comm: Communicator) -> None:
    ours, torchs = ours_and_torchs(comm, output_dtypes)
    assert ours == torchs


def mixed(shards: Any) -> list[object]:
    """With an mp_policy for each block: dtypes within, losses, and gradients' norms."""
    model, found = net(), list[object]()
    shards(model[0], mp_policy=MixedPrecisionPolicy(BF16, torch.float32, torch.float32))
    shards(model[1])
    shards(model[2], mp_policy=MixedPrecisionPolicy(torch.float64))
    shards(model, mp_policy=MixedPrecisionPolicy(BF16, cast_forward_inputs=False))
    for block in model:
        block.register_forward_pre_hook(
            lambda m, i: found.extend((i[0].dtype, next(m.parameters()).dtype))
        )
        block.register_forward_hook(lambda m, i, o: found.append(o.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for seed in range(3):
        out = model(batch(seed))
        out.square().mean().backward()
        found.append(out.sum().item())
        optimizer.step()
        optimizer.zero_grad()
    if hasattr(model, "engine"):
        assert [u.dtypes.reduce for u in model.engine.units[1:]] == [
            torch.float32,
            torch.float32,
            torch.float32,
        ]
        model.engine.close()
    return found


@on_ranks(2)
def test_each_module_has_its_mp_policy_as_with_torchs(comm: Communicator) -> None:
    ours, torchs = ours_and_torchs(comm, mixed)
    assert ours == torchs


@on_ranks(2)
def test_gradients_are_reduced_in_the_dtype_of_the_modules_own_parameters(
    comm: Communicator,
) -> None:
    """Whatever blocks within have; and if it was frozen at the call."""
    model: Any = net().requires_grad_(False)
    model[1].double()
    for module in (model[1], model):
        fronts.fully_shard(module, comm=comm, mp_policy=MixedPrecisionPolicy(BF16))
    reduced = [unit.dtypes.reduce for unit in model.engine.units]
    assert reduced == [torch.float32, torch.float64]
    model.engine.close()


def call_again_after_failure(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, name: str, at: int
) -> str:
    """A collective of this name fails in fully_shard of a model with a sharded block; then it is
    called again."""
    model, calls = net(), 0
    fronts.fully_shard(model[1], comm=comm)
    method = getattr(Communicator, name)

    def raises(self: Communicator, *args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise CommunicationError(f"{name} {at}")
        return method(self, *args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Communicator, name, raises)
        with pytest.raises(CommunicationError, match=f"{name} {at}"):
            fronts.fully_shard(model, comm=comm)
    try:
        fronts.fully_shard(model, comm=comm)
    except UsageError as e:
        return str(e)
    assert_trains(model.engine, net())
    model.engine.close()
    return ""


@on_ranks(2)
def test_a_failed_call_can_be_repeated_or_is_refused(comm: Communicator) -> None:
    """If no parameter has been sliced yet, the second call works; otherwise it says that the model
    is unusable."""
    with pytest.MonkeyPatch.context() as patch:
        assert call_again_after_failure(comm, patch, "all_gather", 1) == ""  # of the block
        assert call_again_after_failure(comm, patch, "broadcast", 1) == ""  # of the first unit
        for name, at in (("broadcast", 2), ("duplicate", 1), ("duplicate", 2)):
            message = call_again_after_failure(comm, patch, name, at)
            assert "weight is sharded already." in message
            assert "make the model anew" in message
    model: Any = net()
    fronts.fully_shard(model[1], comm=comm)
    with pytest.raises(
        UsageError, match=r"reshard_after_forward is 3, over . ranks; allowed: \[1, 2"
    ):
        fronts.fully_shard(model, comm=comm, reshard_after_forward=3)
    numbers, low = nn.Linear(2, 2, dtype=torch.complex64), MixedPrecisionPolicy(BF16)
    with pytest.raises(UsageError, match=r"weight is torch\.complex64; parameters must be floats"):
        fronts.fully_shard(numbers, comm=comm, mp_policy=low)
    with pytest.raises(UsageError, match="3 stands for no ranks"):
        fronts.fully_shard(model, comm=3)
    fronts.fully_shard(model, comm=comm)
    loss(model).backward()
    with pytest.raises(UsageError, match="fully_shard inner modules before those around them"):
        fronts.fully_shard(model[0], comm=comm)
    model.engine.close()
    with pytest.raises(UsageError, match="this model is sharded already"):
        fronts.fully_shard(model, comm=comm)  # closed while its parameters are slices


@on_ranks(2)
def test_a_call_is_repeated_with_what_was_asked_of_blocks(comm: Communicator) -> None:
    """Though the call that failed had closed their engines."""
    model, policy = net(), MixedPrecisionPolicy(BF16)
    low = MixedPrecisionPolicy(BF16, output_dtype=torch.float64)
    fronts.fully_shard(model[2], comm=comm, mp_policy=low)
    model.register_parameter("number", nn.Parameter(torch.zeros(1, dtype=torch.complex64)))
    with pytest.raises(UsageError, match=r"number is torch\.complex64"):
        fronts.fully_shard(model, comm=comm, mp_policy=policy)
    del model.number
    fronts.fully_shard(model, comm=comm, mp_policy=policy)
    assert model(batch()).dtype == torch.float64
    model.engine.close()


@on_ranks(2)
def test_a_block_that_only_some_ranks_have_sharded_is_an_error_on_all(comm: Communicator) -> None:
    model: Any = net()
    with comm.split(comm.rank) as alone:
        if comm.rank == 1:
            fronts.fully_shard(model[1], comm=alone)
        with pytest.raises(UsageError, match=r"sharded over 1 ranks; .* among them: \[1\]"):
            fronts.fully_shard(model, comm=comm)


@on_ranks(1)
def test_a_model_with_an_engine_of_its_own_is_refused_unchanged(comm: Communicator) -> None:
    model = net()
    model[1].add_module("engine", nn.Linear(2, 2))
    fronts.fully_shard(model[2], comm=comm)
    with pytest.raises(UsageError, match=r"Sequential\.engine.*another name"):
        fronts.fully_shard(model[1], comm=comm)
    assert not isinstance(model[1], FSDPModule)
    model[0].engine = "an attribute"
    with pytest.raises(UsageError, match=r"Sequential\.engine.*another name"):
        fronts.fully_shard(model[0], comm=comm)
    assert model[0].engine == "an attribute"
    fronts.fully_shard(model, comm=comm).engine.close()


@on_ranks(2)
def test_a_weight_tied_between_modules_must_be_sharded_around_both(comm: Communicator) -> None:
    model: Any = net()
    model[1][0].weight = model[0][0].weight
    fronts.fully_shard(model[0], comm=comm)
    with pytest.raises(UsageError, match="has it, too, shard one around both in place of each"):
        fronts.fully_shard(model[1], comm=comm)
    model[0].engine.close()


def train_with_empty_modules(shards: Any) -> list[float]:
    """A script that shards all children, and modules without parameters by themselves."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*net(), nn.Sequential(nn.ReLU(), nn.Identity()))
    shards([*model[3]])
    for child in model:
        shards(child)
    shards(model)
    model[3].set_requires_gradient_sync(True)
    alone = shards(nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        alone.unshard()
        out = model(alone(batch(step).requires_grad_()))
        alone.reshard()
        (value := alone(out).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    assert list(alone.state_dict()) == []
    for module in (alone, model):
        if hasattr(module, "engine"):
            module.engine.close()
    return losses


@on_ranks(2)
def test_modules_without_parameters_are_accepted_as_by_torchs(comm: Communicator) -> None:
    ours, torchs = ours_and_torchs(comm, train_with_empty_modules)
    assert ours == pytest.approx(torchs)


@on_ranks(4)
def test_all_of_a_model_is_sharded_over_the_same_ranks(comm: Communicator) -> None:
    """In any order; groups of the same size may be of other ranks. A call whose arguments do not
    fit one another leaves the modules within as they are."""
    model: Any = net()
    with comm.split(comm.rank // 2) as pair, comm.split(comm.rank % 2) as across:
        fronts.fully_shard(model[0], comm=pair)
        fronts.fully_shard(model[1], comm=across)
        message = r"over 2 ranks; of the model's 2, these are among them: \[0\];"
        with pytest.raises(UsageError, match=message):
            fronts.fully_shard(model, comm=across)
    with comm.split(0, key=-comm.rank) as backwards:
        fronts.fully_shard(model[0], comm=backwards)
        with pytest.raises(ModelError, match="Cannot specify both"):
            fronts.fully_shard(model, comm=comm, mesh=backwards)
        assert not model[0].engine.closed
        fronts.fully_shard(model, comm=comm)
        model.engine.close()


def input_dtypes(shards: Any, casts: bool) -> list[torch.dtype]:
    """Of modules that have no parameters of their own."""
    model, found = (
        nn.Sequential(*net(), nn.Tanh(), nn.Linear(6, 6, bias=False)),
        list[torch.dtype](),
    )
    model[4].weight = model[0][0].weight
    policy = MixedPrecisionPolicy(BF16, cast_forward_inputs=casts)
    shards([model[0], model[4]], mp_policy=policy)
    for module in (model[3], model):
        shards(module, mp_policy=policy)
    for block in (model[3], model[4]):
        block.register_forward_pre_hook(lambda _, given: found.append(given[0].dtype))
        block.register_forward_pre_hook(lambda _, given: given[0].to(BF16))
    for block in (model[2], model[3]):
        block.register_forward_hook(lambda _m, _i, out: out.float())
    model(batch().to(BF16)).sum().backward()
    if hasattr(model, "engine"):
        model.engine.close()
    return found


@pytest.mark.parametrize("casts", [True, False])
@on_ranks(2)
def test_modules_without_parameters_of_their_own_cast_inputs(
    comm: Communicator, casts: bool
) -> None:
    ours, torchs = ours_and_torchs(comm, partial(input_dtypes, casts=casts))
    assert ours == torchs == 2 * [BF16 if casts else torch.float32]
