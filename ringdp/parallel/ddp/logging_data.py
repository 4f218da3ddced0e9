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

from ringdp.comm import Communicator
from ringdp.parallel.ddp import profiling
from ringdp.parallel.ddp.reducer import Reducer

ENVIRONMENT = {
    "master_port": "MASTER_PORT",
    "master_addr": "MASTER_ADDR",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
}
GLOO = {
    "gloo_socket_ifname": "GLOO_SOCKET_IFNAME",
    "gloo_device_transport": "GLOO_DEVICE_TRANSPORT",
}
NAMES = {torch.float32: "float", torch.float64: "double"}  # those of C++


def facts(reducer: Reducer) -> dict[str, Any]:
    settings, parameters = reducer.settings, [t.parameter for t in reducer.parameters]
    sizes = [p.nbytes for p in parameters]
    first, last = reducer.layouts[0], reducer.layouts[-1]
    dtypes = {NAMES.get(p.dtype, str(p.dtype).removeprefix("torch.")) for p in parameters}
    told = {
        "world_size": reducer.comm.size,
        "rank": reducer.comm.rank,
        "dtypes": ", ".join(sorted(dtypes)),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(sizes),
        "bucket_cap_bytes": settings.caps[-1],
        "bucket_sizes": _sizes(first, sizes),
        "find_unused_parameters": int(settings.find_unused_parameters),
        "static_graph": int(settings.static_graph),
        "gradient_as_bucket_view": int(settings.gradient_as_bucket_view),
        "can_set_static_graph": int(reducer._ddp_graph_static()),
        "num_buckets_reduced": reducer.started,
        "unused_parameter_size": sum(sizes[i] for i in reducer.unused or ()),
        "has_rebuilt_buckets": int(reducer.rebuilt),
    }
    if reducer.rebuilt:
        told["rebuilt_bucket_sizes"] = _sizes(last, sizes)
        told["rebuilt_per_bucket_param_indices"] = ", ".join(
            " ".join(map(str, members)) for members in last
        )
    if reducer.hook:
        told["comm_hook"] = reducer.hook.name
    told |= {key: os.environ.get(name, "N/A") for key, name in ENVIRONMENT.items()}
    return told | reducer.runtime_log.facts


def backend(group: Any) -> dict[str, Any]:
    """The backend of the torch.distributed group, if any, which torch's class would use."""
    group = None if isinstance(group, Communicator) else group
    told: dict[str, Any] = {"backend_name": profiling.backend(group)}
    if told["backend_name"] == "gloo":
        of_group: Any = group or dist.group.WORLD
        options = of_group._get_backend(torch.device("cpu")).options
        told |= {key: os.environ.get(name, "N/A") for key, name in GLOO.items()}
        told["gloo_num_threads"] = options._threads
    return told


def _sizes(layout: Iterable[Iterable[int]], sizes: list[int]) -> str:
    return ", ".join(str(sum(sizes[i] for i in members)) for members in layout)
