"""What frameworks read of a DistributedDataParallel and call on it beyond torch's documentation:
it is as torch's over gloo, at 2 ranks. Errors are of the types, and say the words, of torch's."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from ringdp import Communicator, DistributedDataParallel
from tests.parallel.ddp_cases import (
    TORCHS,
    WIDTH,
    Branches,
    Outputs,
    Wrap,
    backward,
    equal,
    gloo,
    gradients,
    loss,
    mlp,
    rows,
    says,
)

pytestmark = pytest.mark.process


def of_both(found: Callable[[Wrap], Any]) -> tuple[Any, Any]:
    """What it finds for our class, and for torch's over gloo."""
    gloo()
    results = []
    for wrap in (DistributedDataParallel, TORCHS):
        torch.manual_seed(0)
        results.append(found(wrap))
    return results[0], results[1]


# ---- errors


def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def takes_int(state: object, bucket: int) -> torch.futures.Future[Tensor]:
    raise AssertionError


def gives_int(state: object, bucket: dist.GradBucket) -> int:
    raise AssertionError


# `from __future__ import annotations` made texts of them; torch compares types
for function in (hook, takes_int, gives_int):
    function.__annotations__ = {
        "bucket": int if function is takes_int else dist.GradBucket,
        "return": int if function is gives_int else torch.futures.Future[Tensor],
    }


def registered_twice(wrap: Wrap) -> None:
    net = wrap(mlp())
    for _ in range(2):
        net.register_comm_hook(None, hook)


def static_too_late(wrap: Wrap) -> None:
    net = wrap(mlp())
    backward(net, 0, 0)
    net._set_static_graph()


def unfinished(wrap: Wrap) -> None:
    net = wrap(Outputs())
    loss(net(rows(0, 0))["predictions"][0]).backward()
    net._check_reducer_finalized()


def names(wrap: Wrap, change: Callable[[list[nn.Parameter]], list[nn.Parameter]]) -> None:
    net = wrap(mlp())
    parameters, _ = net._build_params_for_reducer()
    net._build_debug_param_to_name_mapping(change(parameters))


WRONG: dict[str, Callable[[Wrap], object]] = {
    "doesn't have any parameter that requires a gradient": lambda wrap: wrap(
        mlp().requires_grad_(False)
    ),
    "Modules with uninitialized parameters can't be used with": lambda wrap: wrap(nn.LazyLinear(3)),
    "SyncBatchNorm layers only work with GPU modules": lambda wrap: wrap(nn.SyncBatchNorm(2)),
    "device_ids": lambda wrap: wrap(mlp(), device_ids=[0]),
    "Cannot specify both process_group and device_mesh arguments.": lambda wrap: wrap(
        mlp(), process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (2,))
    ),
    "Only 1D device mesh is supported, but got": lambda wrap: wrap(
        mlp(), device_mesh=init_device_mesh("cpu", (1, 2))
    ),
    "Communication hook must be callable": lambda wrap: wrap(mlp()).register_comm_hook(None, 3),
    "Communication hook: bucket annotation should be": lambda wrap: wrap(mlp()).register_comm_hook(
        None, takes_int
    ),
    "Communication hook: return annotation should be": lambda wrap: wrap(mlp()).register_comm_hook(
        None, gives_int
    ),
    "register_builtin_comm_hook can only be called once": registered_twice,
    "sample rate should be equal or greater than 1": lambda wrap: wrap(
        mlp()
    )._set_ddp_runtime_logging_sample_rate(0),
    "should be called before training loop starts": static_too_late,
    "Expected to have finished reduction in the prior iteration": unfinished,
    "DDP Pickling/Unpickling are only supported": lambda wrap: pickle.dumps(
        wrap(mlp(), process_group=dist.new_group())
    ),
    "Param with name": lambda wrap: names(wrap, lambda parameters: parameters[1:]),
    "Expected param to name mapping": lambda wrap: names(
        wrap, lambda parameters: [*parameters, nn.Parameter(torch.ones(1))]
    ),
}


def wrong(comm: Communicator) -> None:
    for words, attempt in WRONG.items():

        def error(wrap: Wrap, attempt: Callable[[Wrap], object] = attempt) -> BaseException:
            with pytest.raises(Exception) as raised:  # noqa: PT011
                attempt(wrap)
            return raised.value

        mine, theirs = of_both(error)
        assert isinstance(mine, type(theirs)), words
        assert words in str(mine)
        assert words in str(theirs)


def test_who_catches_torchs_errors_catches_ours(ranks):
    ranks(2)(wrong)


# ---- read


ABOUT_BOTH = [
    "world_size",
    "rank",
    "module_name",
    "device_ids",
    "output_device",
    "broadcast_buffers",
    "bucket_cap_bytes",
    "dtypes",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "num_parameter_tensors",
    "total_parameter_size_bytes",
    "bucket_sizes",
    "has_rebuilt_buckets",
    "rebuilt_bucket_sizes",
    "rebuilt_per_bucket_param_indices",
    "prev_iteration_grad_ready_order_indices",
    "master_addr",
    "master_port",
    "cuda_visible_devices",
    "torch_distributed_debug",
]


def logged(comm: Communicator) -> None:
    def told(wrap: Wrap) -> dict[str, Any]:
        net: Any = wrap(mlp())
        net._set_ddp_runtime_logging_sample_rate(4)
        for step in range(15):
            backward(net, step, comm.rank)
        return net._get_ddp_logging_data()

    mine, theirs = of_both(told)
    for key in ABOUT_BOTH:
        assert mine[key] == theirs[key], key
    assert mine["backend_name"] == "ringdp"
    assert mine["iteration"] == 12  # 0 to 9, and then every fourth
    for what in ("forward_compute", "backward_compute", "backward_comm"):
        assert mine[f"{what}_time"] > 0
        assert mine[f"avg_{what}_time"] > 0
        assert mine[f"{what}_time_start"] > 1e18  # since the epoch
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


def logged_of_two_dtypes(comm: Communicator) -> None:
    def told(wrap: Wrap) -> list[str]:
        model = nn.Sequential(nn.Linear(WIDTH, 9), nn.Linear(9, 4).double())
        data = wrap(model)._get_ddp_logging_data()
        return [data["dtypes"], data["bucket_sizes"]]

    mine, theirs = of_both(told)
    assert mine == theirs
    assert mine[0] == "double, float"


def test_what_is_logged_is_torchs(ranks):
    ranks(2)(logged_of_two_dtypes)
    ranks(2)(logged)


READ = [
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "bucket_bytes_cap",
    "bucket_bytes_cap_list",
    "broadcast_bucket_size",
    "device",
    "device_type",
    "mixed_precision",
    "require_backward_grad_sync",
    "require_forward_param_sync",
    "forward_sync_buffers",
    "broadcast_buffers",
    "device_ids",
    "output_device",
    "dim",
    "parameters_to_ignore",
    "_has_rebuilt_buckets",
    "_distributed_rank",
]


def read(comm: Communicator) -> None:
    def found(wrap: Wrap) -> list[Any]:
        model = nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3))
        wrap._set_params_and_buffers_to_ignore_for_model(model, ["0.bias", "1.running_var"])
        net = wrap(model, bucket_cap_mb_list=[1, 2], gradient_as_bucket_view=True)
        said = [[getattr(net, name) for name in READ]]
        for _ in range(2):
            backward(net, 0, comm.rank)
        said += [[getattr(net, name) for name in READ]]
        with net.no_sync():
            net(rows(0, 0))
        said += [net.will_sync_module_buffers(), net.require_forward_param_sync]
        said += [len(net.modules_buffers), sorted(net.named_module_buffers)]
        said += [len(net._build_params_for_reducer()[0]), net._build_params_for_reducer()[1]]
        said += [len(list(wrap._get_data_parallel_params(model)))]
        parameters, _ = net._build_params_for_reducer()
        said += [net._build_debug_param_to_name_mapping(parameters)]
        said += [sorted(get_model_state_dict(net))]
        return said

    mine, theirs = of_both(found)
    for ours, torchs in zip(mine, theirs, strict=True):
        assert ours == torchs, f"{ours}, {torchs}"
    assert mine[-1][0] == "0.bias"  # torch's checkpoints leave `module.` out


def test_ignored_parameters_are_left_out_with_their_names():
    """torch's asks its pairs of name and parameter, and leaves none out."""
    model = nn.Linear(2, 2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["bias"])
    ((name, _),) = DistributedDataParallel._get_data_parallel_params(model, named_params=True)
    assert name == "weight"


def test_what_is_read_is_torchs(ranks):
    ranks(2)(read)


def test_it_is_one_to_who_asks():
    assert issubclass(DistributedDataParallel, TORCHS)


# ---- call


def used(comm: Communicator, differ: bool) -> bool:
    """Of each backward the ranks that used each parameter, and whether all were alike so far."""

    def found(wrap: Wrap) -> list[Any]:
        net = wrap(Branches(comm.rank, differ=differ), find_unused_parameters=True)
        said = []
        for step in range(3):
            backward(net, step, comm.rank)
            said.append(
                (net.reducer._get_local_used_map().tolist(), net.reducer._ddp_graph_static())
            )
        return said

    mine, theirs = of_both(found)
    assert mine == theirs
    return mine[-1][1]


@pytest.mark.parametrize("differ", [False, True])
def test_unused_parameters_are_known_as_torch_knows_them(ranks, differ):
    assert ranks(2)(used, differ) == [not differ] * 2


def late(comm: Communicator, unused: bool) -> None:
    """Whether to reduce is said between forward and backward: Lightning, accelerate, pipelining."""

    def found(wrap: Wrap) -> list[Tensor]:
        net: Any = wrap(mlp(), find_unused_parameters=unused)
        reduced = []
        for step in range(3):
            net.zero_grad()
            net.require_backward_grad_sync = False
            out = net(rows(step, comm.rank))
            net.require_backward_grad_sync = net.require_forward_param_sync = True
            net.reducer._rebuild_buckets()
            net.reducer.prepare_for_backward([out])
            loss(out).backward()
            reduced += gradients(net)
        return reduced

    assert equal(*of_both(found))


@pytest.mark.parametrize("unused", [False, True])
def test_a_backward_may_be_told_to_reduce_after_its_forward(ranks, unused):
    ranks(2)(late, unused)


def built_in(comm: Communicator, name: str) -> None:
    kind = getattr(dist.BuiltinCommHookType, name)

    def found(wrap: Wrap) -> list[Tensor]:
        net: Any = wrap(mlp(), bucket_cap_mb=0.001)
        net._register_builtin_comm_hook(kind)
        assert net._get_ddp_logging_data()["comm_hook"] == str(kind)
        return [g for step in range(3) for g in backward(net, step, comm.rank)]

    assert equal(*of_both(found))


@pytest.mark.parametrize("name", ["ALLREDUCE", "FP16_COMPRESS"])
def test_built_in_hooks_give_torchs_bits(ranks, name):
    ranks(2)(built_in, name)


def sparse_built_in(comm: Communicator) -> None:
    def wrap() -> Any:
        torch.manual_seed(0)
        return DistributedDataParallel(nn.Embedding(4, 2, sparse=True), process_group=comm)

    plain, hooked = wrap(), wrap()
    hooked._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    for net in (plain, hooked):
        net(torch.tensor([0, 1 + comm.rank])).sum().backward()
    assert torch.equal(plain.module.weight.grad.to_dense(), hooked.module.weight.grad.to_dense())
    says(lambda: wrap()._register_builtin_comm_hook(3), ValueError)


def test_a_built_in_hook_takes_sparse_gradients(ranks):
    ranks(2)(sparse_built_in)


def taken_over(comm: Communicator) -> None:
    """A backward that raised, and then another class around the same model."""

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, _gradient: Tensor) -> Tensor:
            raise ZeroDivisionError

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    first: Any = DistributedDataParallel(model, process_group=comm)
    tap = model[1].register_forward_pre_hook(lambda _m, x: (Raises.apply(x[0]),))
    with pytest.raises(ZeroDivisionError):
        loss(first(rows(0, comm.rank))).backward()
    tap.remove()
    says(first._check_reducer_finalized)
    first._remove_autograd_hooks()
    sent = first.sent_bytes()
    second: Any = DistributedDataParallel(model, process_group=comm)
    reduced = backward(second, 0, comm.rank)
    second._check_reducer_finalized()
    second._remove_autograd_hooks()
    alone = backward(model, 0, comm.rank)
    for mine, other in zip(reduced, alone, strict=True):
        half = other / comm.size
        comm.all_reduce(half)
        assert torch.equal(mine, half)
    assert first.sent_bytes() == sent


def test_a_model_may_be_taken_over(ranks):
    ranks(2)(taken_over)


def in_place(comm: Communicator) -> None:
    """What forward returns may be changed, with unused parameters sought, and is no copy."""

    def found(wrap: Wrap) -> list[Tensor]:
        net: Any = wrap(mlp(), find_unused_parameters=True)
        if wrap is DistributedDataParallel:
            net._set_ddp_sink_clone(False)
        out = net(rows(0, comm.rank))
        out *= 2
        loss(out).backward()
        return gradients(net)

    assert equal(*of_both(found))


def test_outputs_may_be_changed_in_place(ranks):
    ranks(2)(in_place)


def broadcast(comm: Communicator) -> None:
    net: Any = DistributedDataParallel(nn.BatchNorm1d(WIDTH), process_group=comm)
    for at_once in (None, 8):
        net.module.running_mean.fill_(comm.rank + 3)
        net._default_broadcast_coalesced(bucket_size=at_once, authoritative_rank=1)
        assert net.module.running_mean.tolist() == [4] * WIDTH
    one = torch.full((2,), float(comm.rank))
    net._default_broadcast_coalesced([one])
    assert one.tolist() == [0, 0]


def test_buffers_take_a_ranks_values_when_asked(ranks):
    ranks(2)(broadcast)
