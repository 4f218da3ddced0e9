"""The result of `_get_ddp_logging_data`: torch's keys that apply here. Sizes are in bytes.

Unlike torch's, `iteration` and the times are of the last sampled iteration as soon as it ends, not
when the next one begins; keys about CUDA streams are left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ringdp.comm import Communicator
from ringdp.parallel.ddp import profiling
from ringdp.parallel.ddp.module import Replica
from ringdp.parallel.ddp.sync_batchnorm import SyncBatchNorm

# Environment variables, whose keys are their names in lower case.
VARIABLES = ("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
GLOO = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")
NAMES = {torch.float32: "float", torch.float64: "double"}  # those of C++
SYNCED = (SyncBatchNorm, nn.SyncBatchNorm)


def facts(net: Replica) -> dict[str, Any]:
    reducer, settings = net.reducer, net.settings
    group: Any = None if isinstance(net._group, Communicator) else net._group
    parameters = [t.parameter for t in reducer.parameters]
    sizes = [p.nbytes for p in parameters]
    dtypes = {NAMES.get(p.dtype, str(p.dtype).removeprefix("torch.")) for p in parameters}
    told = {
        "world_size": reducer.comm.size,
        "rank": reducer.comm.rank,
        "module_name": type(net.module).__name__,
        "device_ids": ", ".join(map(str, net.device_ids or ())),
        "output_device": -1 if net.output_device is None else net.output_device,
        "broadcast_buffers": int(net.forward_sync_buffers),
        "has_sync_bn": int(any(isinstance(m, SYNCED) for m in net.module.modules())),
        "join_uneven_inputs": int(net._uneven is not None),
        "dtypes": ", ".join(sorted(dtypes)),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(sizes),
        "bucket_cap_bytes": settings.caps[-1],
        "bucket_sizes": _sizes(reducer.layouts[0], sizes),
        "find_unused_parameters": int(settings.find_unused_parameters),
        "static_graph": int(settings.static_graph),
        "gradient_as_bucket_view": int(settings.gradient_as_bucket_view),
        "can_set_static_graph": int(reducer._ddp_graph_static()),
        "num_buckets_reduced": reducer.started,
        "unused_parameter_size": sum(sizes[i] for i in reducer.unused or ()),
        "has_rebuilt_buckets": int(reducer.rebuilt),
        "backend_name": profiling.backend(group),  # which torch's class would use
        **_environment(VARIABLES),
        **reducer.runtime_log.facts,
    }
    if reducer.rebuilt:
        rebuilt = reducer.layouts[-1]
        told["rebuilt_bucket_sizes"] = _sizes(rebuilt, sizes)
        told["rebuilt_per_bucket_param_indices"] = ", ".join(
            " ".join(map(str, members)) for members in rebuilt
        )
    if reducer.hook:
        told["comm_hook"] = reducer.hook.name
    if told["backend_name"] == "gloo":
        told |= _environment(GLOO)
        gloo: Any = group or dist.group.WORLD
        told["gloo_num_threads"] = gloo._get_backend(torch.device("cpu")).options._threads
    return told


def _environment(names: Iterable[str]) -> dict[str, str]:
    return {name.lower(): os.environ.get(name, "N/A") for name in names}


def _sizes(layout: Iterable[Iterable[int]], sizes: list[int]) -> str:
    return ", ".join(str(sum(sizes[i] for i in members)) for members in layout)
