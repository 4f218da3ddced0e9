"""torch's built-in communication hooks, over ringdp: torch.distributed.BuiltinCommHookType.

ALLREDUCE      every gradient divided by n, then summed: what is done without a hook
FP16_COMPRESS  the same in float16
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import BuiltinCommHookType

from ringdp.errors import UsageError
from ringdp.parallel.ddp.bucket import Bucket
from ringdp.parallel.ddp.profiled import all_reduce

KINDS = (BuiltinCommHookType.ALLREDUCE, BuiltinCommHookType.FP16_COMPRESS)


class BuiltIn(NamedTuple):
    """See `hook.CommHook`."""

    kind: Any

    @property
    def name(self) -> str:
        return str(self.kind)

    def start(self, bucket: Bucket, *, last: bool) -> Callable[[], object]:
        gradients = bucket.tensor()
        if self.kind == BuiltinCommHookType.ALLREDUCE:
            bucket.store(gradients.div_(bucket.comm.size))
            return bucket.start()
        if gradients.is_sparse:
            raise UsageError(f"{self.name} takes no sparse gradients: register ALLREDUCE")
        half = gradients.to(torch.float16).div_(bucket.comm.size)
        work = all_reduce(bucket.comm, half, tag=bucket.index)

        def finish() -> None:
            work.wait()
            bucket.store(half)

        return finish


def built_in(kind: Any) -> BuiltIn:
    """Raises UsageError for what is none."""
    if kind not in KINDS:
        raise UsageError(f"the hook is {kind!r}; allowed: {', '.join(map(str, KINDS))}")
    return BuiltIn(kind)
