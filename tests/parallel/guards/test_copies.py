"""A deepcopy of a sharded model is an ordinary model with its values and without an engine."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import ringdp
from ringdp import Communicator, Precision, UsageError
from tests.parallel.small import assert_equal, loss, net, with_and_without_precision
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


@with_and_without_precision
@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_a_deepcopy_is_an_ordinary_model(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    model = net()
    model.engine = engine = ringdp.shard(model, stage=stage, precision=precision, comm=comm)  # type: ignore[assignment]
    if stage:
        with pytest.raises(UsageError, match=r"copied: .* Copy it within full_parameters"):
            copy.deepcopy(model)
    with pytest.raises(UsageError, match="is pickled"):
        pickle.dumps(model)
    with engine.full_parameters():
        twin = copy.deepcopy(model)
    assert twin.engine is None
    assert_equal(engine, twin)
    issued = engine.gathering.comm.issued
    if comm.rank == 0:
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        loss(twin).backward()
        optimizer.step()
        assert pickle.loads(pickle.dumps(twin.state_dict()))
    assert engine.gathering.comm.issued == issued
    loss(model).backward()
    again = ringdp.shard(twin, stage=stage, comm=comm)
    again.close()
    engine.close()


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(1)
def test_the_engine_of_initialize_is_not_copied(comm: Communicator, stage: int) -> None:
    model, config = net(), {"train_micro_batch_size_per_gpu": 4}
    engine, *_ = ringdp.initialize(
        model=model, optimizer=ringdp.AdamW, comm=comm,
        config=config | {"zero_optimization": {"stage": stage}},
    )  # fmt: skip
    model.trained_by = engine  # type: ignore[assignment]
    with engine.engine.full_parameters():
        with pytest.raises(UsageError, match=r"is copied.* Copy its \.module"):
            copy.deepcopy(engine)
        twin = copy.deepcopy(engine.module)
    assert twin.trained_by is None
    again, *_ = ringdp.initialize(model=twin, optimizer=ringdp.AdamW, comm=comm, config=config)
    again.backward(loss(again))
    again.engine.close()
    engine.engine.close()


@on_ranks(2)
def test_a_module_that_fully_shard_took_names_what_to_use_when_pickled(comm: Communicator) -> None:
    model = ringdp.fully_shard(net(), comm=comm)
    for pickled in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(UsageError, match=r"is pickled.* Use ringdp.save or ringdp.export"):
            pickled(model)
    twin = copy.copy(model)
    assert type(twin) is type(net())
    assert [*twin.parameters()] == [*model.parameters()]
    model.engine.close()


class Rebuilt(torch.nn.Linear):
    def __reduce__(self) -> tuple[type[Rebuilt], tuple[int, int]]:
        return Rebuilt, (self.in_features, self.out_features)


@on_ranks(2)
def test_a_module_that_says_how_it_is_pickled_is_pickled_so(comm: Communicator) -> None:
    model = ringdp.fully_shard(Rebuilt(3, 2), comm=comm)
    kind = type(model)
    twin = pickle.loads(pickle.dumps(model))
    assert type(twin) is Rebuilt
    assert twin.weight.shape == (2, 3)
    assert type(model) is kind
    model.engine.close()
