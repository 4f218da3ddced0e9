"""Wrong configs and arguments of `initialize`, and errors raised in it: the model is unchanged."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import ringdp
from ringdp import UsageError
from ringdp.parallel import fronts
from ringdp.parallel.fronts.deepspeed_config import AUTO, KEYS, read
from tests.equal import equal
from tests.parallel.fronts.test_initialize import ADAM, NAMED, SIZED, train
from tests.parallel.fronts.test_initialize_scales import falling
from tests.parallel.small import batch, net

# ---- the config


def test_errors_in_a_config_file_are_those_of_a_mapping(tmp_path):
    file = tmp_path / "ds.json"
    for text, message in (
        ('{"nothing": 1}', "^config: nothing is not implemented"),
        ("[]", r"^config is \[\]; allowed: a section with"),
        ("{", "^config '.*ds.json' cannot be read as JSON: Expecting"),
    ):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match=message):
            read(file)


SECTIONS = (
    (),
    ("optimizer",),
    ("scheduler",),
    ("fp16",),
    ("bf16",),
    ("zero_optimization",),
    ("zero_optimization", "offload_param"),
    ("zero_optimization", "offload_optimizer"),
)


def nested(section: tuple[str, ...], value: Any) -> Any:
    for name in reversed(section):
        value = {name: value}
    return value


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("unknown", ["nothing", "rate", 3])
def test_an_unknown_key_is_an_error_at_every_depth(section, unknown):
    where = ".".join(("config", *section))
    with pytest.raises(UsageError, match=f"^{where}: {unknown} is not implemented"):
        read(nested(section, {unknown: 1}))


@pytest.mark.parametrize("section", SECTIONS[1:])
@pytest.mark.parametrize("wrong", [True, 3, "cpu", []])
def test_a_section_must_be_a_mapping(section, wrong):
    where = ".".join(("config", *section))
    with pytest.raises(UsageError, match=f"^{where} is .*; allowed: a section with"):
        read(nested(section, wrong))


def leaves(keys: dict[str, Any], section: tuple[str, ...] = ()) -> list[tuple[Any, Any]]:
    """All keys, with their section."""
    return [
        found
        for name, key in keys.items()
        for found in (
            leaves(key, (*section, name)) if isinstance(key, dict) else [((*section, name), key)]
        )
    ]


@pytest.mark.parametrize(
    ("place", "key"), [leaf for leaf in leaves(KEYS) if leaf[1].kind != "unused"], ids=str
)
def test_values_of_wrong_types_are_refused(place, key):
    for wrong in (
        *["auto"] * (place[-1] not in AUTO),
        [],
        key.least - 1,
        key.least - 0.5,
        float("nan"),
        float("inf"),
        *[True] * (key.kind != "bool" and key.default is not True),
    ):
        with pytest.raises(UsageError, match=rf"^config\.{'.'.join(place)} is .*; allowed: "):
            read(nested(place, wrong))


# ---- initialize


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def stepped_optimizer() -> tuple[Any, torch.optim.Optimizer]:
    model = net()
    optimizer = ADAM(model.parameters())
    model(batch()).mean().backward()
    optimizer.step()
    return model, optimizer


def config(**values: Any) -> dict[str, Any]:
    return {"config": NAMED | values}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": None}, "initialize takes a module; this is a NoneType"),
        ({"model": torch.nn.Identity()}, "the model has no parameter"),
        ({"config": None}, "0 configs; allowed: one, as config or as args"),
        ({"config": "/none/ds.json"}, "config '/none/ds.json' cannot be read as JSON"),
        ({"config": sys.executable}, "cannot be read as JSON"),
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
        (
            dict(zip(("model", "optimizer"), stepped_optimizer(), strict=True)),
            "has state of whole parameter",
        ),
        ({"config": SIZED | {"optimizer": {"type": "OneBitAdam"}}}, "'OneBitAdam'; allowed: Adam"),
        (
            {"config": SIZED | {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}},
            "config.optimizer.params: lr is 'auto'; allowed: its value",
        ),
        ({"optimizer": torch.optim.LBFGS}, r"step of LBFGS needs an argument \(.*'closure'"),
        ({"config": SIZED}, "optimizer=None.*allowed: an optimizer, what makes one"),
        (config(train_batch_size=7, gradient_accumulation_steps=2), "is not micro"),
        (config(zero_optimization={"stage": 7}), "stage is 7"),
        (
            config(zero_optimization={"reduce_bucket_size": 9}) | {"unit": torch.nn.Linear},
            "unit '0.0' has 42",
        ),
        (
            config(zero_optimization={"stage": 3, "stage3_max_live_parameters": 9}),
            "allows 36 bytes",
        ),
        (config(zero_optimization={"offload_param": {"device": "nvme"}}), "is 'nvme'; allowed: 'n"),
        (config(zero_optimization={"contiguous_gradients": False}), "is False; allowed: true"),
        (config(fp16={"enabled": True}, bf16={"enabled": True}), "both enabled"),
        (config(fp16={"initial_scale_power": 128}), "of at least 0 and below 128"),
        (config(fp16={"enabled": True, "min_loss_scale": 0}), "minimum=0"),
        (config(prescale_gradients=0), "is 0; allowed: false"),
        (config(data_types={"grad_accum_dtype": "bf16"}), "is 'bf16'; allowed: \"fp32\""),
        (config(zero_optimization={"sub_group_size": 1e6}), "a whole number of at least 1e"),
        (config(amp={"enabled": True}), "does not say that it is enabled"),
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
            {"config": NAMED | {"scheduler": {"type": "OneCycle"}}},
            "'OneCycle'; allowed: WarmupLR, WarmupDecayLR, WarmupCosineLR, and torch.optim.lr_sch",
        ),
        *(
            ({"config": NAMED | {"scheduler": {"type": name}}}, f"'{name}'; allowed: WarmupLR")
            for name in ("LRScheduler", "_LRScheduler")
        ),
        (
            {"config": SIZED | {"optimizer": {"type": "Optimizer", "params": {"defaults": {}}}}},
            "'Optimizer'; allowed: Adam",
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
            {
                "config": SIZED
                | {"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}
            },
            "do not fit Adam: .*unexpected keyword argument 'bias_correction'",
        ),
        (
            {"config": SIZED | {"optimizer": {"type": "SGD", "params": {"eps": 1}}}},
            "do not fit SGD: .*unexpected keyword argument 'eps'",
        ),
    ],
)
def test_wrong_arguments_are_refused_and_leave_the_model_unchanged(given, message):
    comm, model = ringdp.init(), net()
    with pytest.raises(UsageError, match=message):
        fronts.initialize(**({"model": model, "config": NAMED, "comm": comm} | given))
    engine, *_ = fronts.initialize(model=model, config=NAMED, comm=comm)
    train(engine, 0)
    engine.engine.close()


def test_errors_of_user_code_leave_the_model_unchanged():
    def raises(_: object) -> Any:
        raise KeyError("mine")

    comm, model = ringdp.init(), net()
    before = [p.clone() for p in model.parameters()]
    config = NAMED | {"zero_optimization": {"stage": 3}}
    for given in ({"optimizer": raises}, {"lr_scheduler": raises}):
        with pytest.raises(KeyError, match="mine"):
            fronts.initialize(model=model, config=config, comm=comm, **given)
        assert equal(model.parameters(), before)


def test_errors_leave_a_model_in_16_bits_unchanged():
    def raises(_: object) -> Any:
        raise KeyError("mine")

    comm, model, shares = ringdp.init(), *(net().to(torch.bfloat16) for _ in range(2))
    last = [*shares.parameters()][-1]
    shares.register_parameter("same", torch.nn.Parameter(last.data))
    config = NAMED | {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    for m, error, message in (
        (shares, UsageError, "in the same memory"),
        (model, KeyError, "mine"),
    ):
        m.register_buffer("scale", torch.linspace(0.5, 1.0, 5))
        before = [t.clone() for t in m.state_dict().values()]
        with pytest.raises(error, match=message):
            fronts.initialize(model=m, config=config, comm=comm, lr_scheduler=raises)
        assert equal(m.state_dict().values(), before)
        assert {p.dtype for p in m.parameters()} == {torch.bfloat16}
