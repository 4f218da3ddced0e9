"""Undocumented attributes of torch's DistributedDataParallel that frameworks read are the same on
ours, at 2 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import ringdp
from ringdp import Communicator, DistributedDataParallel
from tests.parallel.ddp.cases import (
    NAMES_SYNCS,
    TORCHS,
    WIDTH,
    Branches,
    Wrap,
    backward,
    mlp,
    ours_and_torchs,
    rows,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


ABOUT_BOTH = (
    "world_size", "rank", "module_name", "device_ids", "output_device", "broadcast_buffers",
    "bucket_cap_bytes", "dtypes", "find_unused_parameters", "gradient_as_bucket_view",
    "num_parameter_tensors", "total_parameter_size_bytes", "bucket_sizes", "has_rebuilt_buckets",
    "rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices",
    "prev_iteration_grad_ready_order_indices", "master_addr", "master_port", "cuda_visible_devices",
    "torch_distributed_debug", "backend_name", "gloo_num_threads",
)  # fmt: skip


@pytest.mark.parametrize("seeks_unused", [False, True])
@on_ranks(2)
def test_logging_data_equals_torchs(comm: Communicator, seeks_unused: bool) -> None:
    def logging_data(wrap: Wrap) -> dict[str, Any]:
        net: Any = wrap(mlp(), find_unused_parameters=seeks_unused)
        net._set_ddp_runtime_logging_sample_rate(4)
        for step in range(15):
            backward(net, step, comm.rank)
        return net._get_ddp_logging_data()

    mine, theirs = ours_and_torchs(logging_data)
    assert seeks_unused or mine.keys() >= {*ABOUT_BOTH}
    for key in ABOUT_BOTH:
        assert mine.get(key) == theirs.get(key), key
    assert mine["iteration"] == 12  # 0 to 9, and then every fourth
    for what in ("forward_compute", "backward_compute", "backward_comm"):
        assert mine[f"{what}_time"] > 0
        assert mine[f"avg_{what}_time"] > 0
        assert mine[f"{what}_time_start"] > 1e18  # ns since the epoch
    began, gradient, end = (
        mine[f"{when}"]
        for when in (
            "forward_compute_time_start",
            "backward_compute_time_start",
            "backward_compute_time_end",
        )
    )
    assert began <= gradient <= end <= mine["backward_comm_time_end"]
    assert gradient <= mine["backward_comm_time_start"]
    overlap = mine["backward_compute_comm_overlap_time"]
    assert 0 <= overlap <= min(mine["backward_compute_time"], mine["backward_comm_time"])


@on_ranks(2)
def test_logging_data_of_two_dtypes_equals_torchs(comm: Communicator) -> None:
    def logging_data(wrap: Wrap) -> list[str]:
        model = nn.Sequential(nn.Linear(WIDTH, 9), nn.Linear(9, 4).double())
        data = wrap(model)._get_ddp_logging_data()
        return [data["dtypes"], data["bucket_sizes"]]

    mine, theirs = ours_and_torchs(logging_data)
    assert mine == theirs
    assert mine[0] == "double, float"


READ = (
    "find_unused_parameters", "static_graph", "gradient_as_bucket_view", "bucket_bytes_cap",
    "bucket_bytes_cap_list", "broadcast_bucket_size", "device", "device_type", "mixed_precision",
    "require_backward_grad_sync", "require_forward_param_sync",
    "broadcast_buffers", "device_ids", "output_device", "dim", "parameters_to_ignore",
    "_has_rebuilt_buckets", "_distributed_rank",
)  # fmt: skip
if NAMES_SYNCS:
    READ += ("forward_sync_buffers",)


def test_ignored_parameters_are_left_out_of_named_ones():
    """torch's own method leaves none out when it is asked for names."""
    model = nn.Linear(2, 2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["bias"])
    ((name, _),) = DistributedDataParallel._get_data_parallel_params(model, named_params=True)
    assert name == "weight"


@on_ranks(2)
def test_attributes_equal_torchs(comm: Communicator) -> None:
    def found(wrap: Wrap) -> list[Any]:
        model = nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3))
        wrap._set_params_and_buffers_to_ignore_for_model(model, ["0.bias", "1.running_var"])
        net = wrap(model, bucket_cap_mb_list=[1, 2], gradient_as_bucket_view=True)
        values = [[getattr(net, name) for name in READ]]
        for _ in range(2):
            backward(net, 0, comm.rank)
        values += [[getattr(net, name) for name in READ]]
        with net.no_sync():
            net(rows(0, 0))
        values += [net.will_sync_module_buffers(), net.require_forward_param_sync]
        values += [len(net.modules_buffers), sorted(net.named_module_buffers)]
        values += [len(net._build_params_for_reducer()[0]), net._build_params_for_reducer()[1]]
        values += [len(list(wrap._get_data_parallel_params(model)))]
        parameters, _ = net._build_params_for_reducer()
        values += [net._build_debug_param_to_name_mapping(parameters)]
        values += [sorted(get_model_state_dict(net))]
        net.broadcast_buffers = False
        values += [net.broadcast_buffers, net.will_sync_module_buffers()]
        return values

    mine, theirs = ours_and_torchs(found)
    for ours, torchs in zip(mine, theirs, strict=True):
        assert ours == torchs, f"{ours}, {torchs}"
    assert mine[-3][0] == "0.bias"  # torch's checkpoints leave out `module.`


def test_finalize_backward_can_be_called_by_the_caller():
    """As callers in torch 2.15 and later do after a backward, when the flag says so."""
    net: Any = DistributedDataParallel(nn.Linear(2, 2), process_group=ringdp.init())
    assert not net.should_finalize_after_backward
    net.require_manual_backward_finalization = True
    net(torch.ones(1, 2)).sum().backward()
    assert net.should_finalize_after_backward
    net.finalize_backward()
    assert net.module.weight.grad.tolist() == [[1.0, 1.0]] * 2


def test_it_is_a_subclass_of_torchs():
    assert issubclass(DistributedDataParallel, TORCHS)


@pytest.mark.parametrize("differ", [False, True])
@on_ranks(2)
def test_the_map_of_used_parameters_equals_torchs(comm: Communicator, differ: bool) -> None:
    """The ranks that used each parameter in each backward, and whether the graph was static so
    far."""

    def found(wrap: Wrap) -> list[Any]:
        net = wrap(Branches(comm.rank, differ=differ), find_unused_parameters=True)
        values = []
        for step in range(4):
            if step == 2:
                net.module.step = 0  # from now on the same branch
            backward(net, step, comm.rank)
            values.append(
                (net.reducer._get_local_used_map().tolist(), net.reducer._ddp_graph_static())
            )
        return values

    mine, theirs = ours_and_torchs(found)
    assert mine == theirs
    assert mine[-1][1] != differ
