"""torch's own tests of DistributedDataParallel, run on ours: the test bodies that come with torch,
unchanged, at 2 ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from torch import nn

from ringdp import Communicator, DistributedDataParallel, SyncBatchNorm
from tests.parallel.ddp.cases import gloo
from tests.torchs_bodies import names, run_body, torchs

pytestmark = pytest.mark.process

NAMES = names(about_ddp=True)
NOT_HERE = {
    "test_DistributedDataParallel_non_default_stream": "it works on a CUDA stream",
    "test_ddp_hook_parity_post_localSGD": "it makes a group for every CUDA device",
    "test_ddp_logging_data_gpu": "it reads device_ids",
    "test_SyncBatchNorm_process_group": "it takes a model of torchvision",
    "test_ddp_profiling_execution_trace": "it wants NCCL's events",
    "test_ddp_sync_bn_training_vs_eval": "torch skips it, too",
    "test_ddp_device": "it moves inputs to device_ids",
    "test_ddp_has_finalized": "it waits for NCCL's watchdog",
    "test_ddp_hook_pickling_powerSGD": "torch.load refuses what it has saved",
}
# Bodies that take long on a CPU: text to replace -> replacement.
SMALLER = {
    "test_ddp_uneven_inputs": {"dim = 1000": "dim = 20", "[2, 3, 10]": "[3]"},
    "test_ddp_compile_static_graph": {"compile(": "compile(backend='aot_eager', model="},
}


class OursWithoutDevices(DistributedDataParallel):
    def __init__(
        self, module: nn.Module, device_ids: Any = None, output_device: Any = None, **more: Any
    ) -> None:
        """Ignores `device_ids` and `output_device`, which name GPUs."""
        super().__init__(module, **more)


def run(comm: Communicator, name: str) -> None:
    gloo()
    ours = {"DistributedDataParallel": OursWithoutDevices}
    with (
        mock.patch.multiple(nn.parallel, **ours),
        mock.patch.multiple(nn.parallel.distributed, **ours),
        mock.patch.multiple(torchs, **ours),
        mock.patch.object(nn, "SyncBatchNorm", SyncBatchNorm),
    ):
        run_body(comm, name, SMALLER.get(name, {}))


@pytest.mark.parametrize("name", NAMES)
def test_a_test_body_of_torch_passes(ranks, name):
    if name in NOT_HERE:
        pytest.skip(NOT_HERE[name])
    ranks(2)(run, name)
