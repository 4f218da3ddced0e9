"""torch's own tests of torch.distributed, run over the backend: the test bodies that come with
torch, unchanged, at 3 ranks, or at 4 if they are for an even number. (Those of DDP:
tests/parallel/ddp.)"""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest

from ringdp import Communicator
from tests.comm.backend.jobs import world
from tests.torchs_bodies import BASE, names, run_body, torchs

pytestmark = pytest.mark.process

FOR_EVEN = {
    "test_3_level_hierarchical_model_averager",
    "test_new_subgroups",
    "test_new_subgroups_by_enumeration",
    "test_new_subgroups_overlap_not_allowed",
    "test_new_subgroups_with_group_param",
    "test_new_subgroups_world_size_not_divisible_by_group_size",
}
NAMES = names(about_ddp=False)
NOT_HERE = {
    name: f"on the CPU it is {twin}"
    for name in NAMES
    if (twin := name.replace("_cuda", "")) != name and hasattr(BASE, twin)
}
for why, excused in {
    "it wants NCCL": (
        "test_average_parameters",
        "test_batch_isend_irecv_mixed_backend_err",
        "test_monitored_barrier_allreduce_hang",
        "test_monitored_barrier_allreduce_hang_wait_all_ranks",
        "test_nccl_high_priority_stream",
        "test_send_recv_nccl",
        "test_send_recv_nccl_autograd_profiler",
        "test_send_recv_nccl_torch_profiler",
    ),
    "a rank sends to itself, which only NCCL allows": (
        "test_batch_isend_irecv_nccl",
        "test_batch_isend_irecv_self_nccl",
    ),
    "torch's monitored_barrier refuses every backend but gloo": (
        "test_monitored_barrier_failure_order",
        "test_monitored_barrier_gloo",
        "test_monitored_barrier_gloo_subgroup",
        "test_monitored_barrier_wait_all_ranks",
    ),
    "it wants gloo's words for a timeout": ("test_barrier_timeout_arg",),
    "it gives a busy machine 1 s to make a group, or waits 5 s": (
        "test_barrier_timeout_full_group",
        "test_barrier_timeout_global",
        "test_barrier_timeout_group",
    ),
    "it is about torch's DDP": (
        "test_accumulate_gradients_no_sync",
        "test_accumulate_gradients_no_sync_grad_is_view",
        "test_compute_bucket_assignment_by_size_sparse_error_with_logger",
        "test_compute_bucket_assignment_by_size_sparse_error_without_logger",
        "test_verify_model_across_rank_with_logger",
        "test_verify_model_across_rank_without_logger",
    ),
}.items():
    NOT_HERE |= dict.fromkeys(excused, why)


def run(comm: Communicator, name: str, folder: Path) -> None:
    with (
        mock.patch.object(torchs, "BACKEND", "ringdp"),
        mock.patch.dict(os.environ, TEMP_DIR=str(folder)),
        world(comm, "ringdp"),
    ):
        run_body(comm, name, {})


@pytest.mark.parametrize("name", NAMES)
def test_a_test_body_of_torch_passes(forks, name: str, tmp_path: Path) -> None:
    if name in NOT_HERE:
        pytest.skip(NOT_HERE[name])
    (tmp_path / "test_dir").mkdir()  # where test_get_rank expects it
    forks.succeed(4 if name in FOR_EVEN else 3, run, name, tmp_path)
