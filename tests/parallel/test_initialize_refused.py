"""What `initialize` refuses, and what raises in it: the model stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import ringdp
from ringdp import UsageError
from ringdp.parallel import fronts
from tests.parallel.small import batch, net
from tests.parallel.test_initialize import ADAM, NAMED, SIZED, falling, trained


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def stepped() -> tuple[Any, torch.optim.Optimizer]:
    model = net()
    optimizer = ADAM(model.parameters())
    model(batch()).mean().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": None}, "initialize takes a module; this is a NoneType"),
        ({"config": NAMED, "config_params": NAMED}, "2 configs; allowed: one"),
        ({"mpu": 3}, "mpu=3 is not implemented"),
        ({"mesh_param": (1, 1)}, r"mesh_param=\(1, 1\) is not implemented"),
        ({"dist_init_required": True}, "dist_init_required=True is not implemented"),
        ({"distributed_port": 1}, "distributed_port=1 is not implemented"),
        ({"training_data": Stream()}, "training_data is a Stream; allowed: a Dataset with"),
        ({"lr_scheduler": 3}, "lr_scheduler=3.: allowed: a scheduler, or what makes"),
        ({"lr_scheduler": falling(ADAM(net().parameters()))}, "is of another optimizer than"),
        ({"optimizer": ADAM(net().parameters())}, "is not one of the model's parameters"),
        ({"model_parameters": net().parameters()}, "is not one of the model's parameters"),
        ({"model_parameters": [("name", 3)]}, "step a tuple that is not one of"),
        (dict(zip(("model", "optimizer"), stepped(), strict=True)), "has state of whole parameter"),
        ({"config": SIZED | {"optimizer": {"type": "OneBitAdam"}}}, "'OneBitAdam'; allowed: Adam"),
        (
            {"config": SIZED | {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}},
            "config.optimizer.params: lr is 'auto'; allowed: its value",
        ),
        (
            {"config": NAMED | {"scheduler": {"type": "StepLR"}}, "lr_scheduler": falling},
            "a lr_scheduler and config.scheduler; allowed: one",
        ),
        (
            {"config": NAMED | {"gradient_clipping": "auto"}},
            "config.gradient_clipping is 'auto'; allowed: a number",
        ),
        (
            {"config": NAMED | {"train_micro_batch_size_per_gpu": "auto"}},
            "give train_batch_size or train_micro_batch_size_per_gpu",
        ),
        (
            {"config": NAMED | {"scheduler": {"type": "LRRangeTest"}}},
            "'LRRangeTest'; allowed: WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, and torch",
        ),
        (
            {
                "config": NAMED
                | {
                    "scheduler": {
                        "type": "OneCycle",
                        "params": {
                            "cycle_min_lr": 0,
                            "cycle_max_lr": 1,
                            "cycle_first_step_size": 0,
                        },
                    }
                }
            },
            "do not fit OneCycle: step sizes are 0 and 0; allowed: at least 1",
        ),
        (
            {"config": NAMED | {"scheduler": {"type": "WarmupDecayLR"}}},
            "config.scheduler.params {} do not fit WarmupDecayLR: .*total_num_steps",
        ),
        (
            {"config": NAMED | {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": 3}}}},
            "do not fit WarmupLR: allowed: warmup_type 'log' or 'linear'",
        ),
        (
            {"config": SIZED | {"optimizer": {"type": "SGD", "params": {"eps": 1}}}},
            "do not fit SGD: .*unexpected keyword argument 'eps'",
        ),
    ],
)
def test_what_is_not_done_is_told_and_the_model_stays_as_it_was(given, said):
    comm, model = ringdp.init(), net()
    with pytest.raises(UsageError, match=said):
        fronts.initialize(**({"model": model, "config": NAMED, "comm": comm} | given))
    engine, *_ = fronts.initialize(model=model, config=NAMED, comm=comm)
    trained(engine, 0)
    engine.engine.close()


def test_what_the_users_own_code_raises_leaves_the_model_as_it_was():
    def raises(_: object) -> Any:
        raise KeyError("mine")

    comm, model = ringdp.init(), net()
    before = [p.clone() for p in model.parameters()]
    config = NAMED | {"zero_optimization": {"stage": 3}}
    for given in ({"optimizer": raises}, {"lr_scheduler": raises}):
        with pytest.raises(KeyError, match="mine"):
            fronts.initialize(model=model, config=config, comm=comm, **given)
        assert all(map(torch.equal, model.parameters(), before))
