"""What an optimizer looks at is known by its class, its options or its attribute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ringdp import UsageError
from ringdp.parallel.optimizer.kinds import check_slices, needs_whole
from tests.parallel.small import net


def test_which_optimizers_look_at_what() -> None:
    def made(name: str, **options: Any) -> torch.optim.Optimizer:
        kind: Any = type(name, (torch.optim.SGD,), {})
        return kind([{"params": [nn.Parameter(torch.ones(1))]} | options])

    for name in ("Muon", "Adafactor", "Lamb", "MyMuon", "adafactor_bf16"):
        assert needs_whole(made(name)), name
        check_slices(made(name), "here", "")
    assert needs_whole(type("Mine", (torch.optim.Adafactor,), {})(net().parameters()))
    assert needs_whole(made("AdamW", caution=True))
    assert not needs_whole(made("AdamW", caution=False))
    own = made("Muon")
    own.needs_whole_parameters = False
    assert not needs_whole(own)
    for found, options in (
        ("Lamb with a max_grad_norm", {"max_grad_norm": 1.0}),
        ("Prodigy without fsdp_in_use=True", {}),
        ("LBFGS", {}),
    ):
        with pytest.raises(UsageError, match=f"{found} looks at all parameters at once"):
            check_slices(made(found.split()[0], **options), "here", "")
