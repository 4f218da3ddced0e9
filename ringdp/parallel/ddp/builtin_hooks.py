"""Built-in communication hooks, over ringdp: torch's BuiltinCommHookType, and mixed precision's.

ALLREDUCE      divide every gradient by n, then sum: the same as without a hook
FP16_COMPRESS  the same in float16
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import BuiltinCommHookType

from ringdp.errors import UsageError
from ringdp.parallel.ddp.bucket import Bucket
from ringdp.parallel.ddp.profiling import all_reduce

KINDS = {BuiltinCommHookType.ALLREDUCE: None, BuiltinCommHookType.FP16_COMPRESS: torch.float16}


class BuiltIn(NamedTuple):
    """As `comm_hooks.CommHook`. `dtype`: of the sum; None is the bucket's. `divides_sum`: the sum
    is divided by n, not the gradients."""

    name: str
    dtype: torch.dtype | None
    divides_sum: bool = False

    def start(self, bucket: Bucket, *, last: bool) -> Callable[[], object]:
        gradients, ranks = bucket.tensor(), bucket.comm.size
        if self.dtype is None and not self.divides_sum:
            bucket.store(gradients.div_(ranks))
            return bucket.start()
        if gradients.is_sparse:
            raise UsageError(f"{self.name} takes no sparse gradients: register ALLREDUCE")
        low = gradients.to(self.dtype)
        if not self.divides_sum:
            low.div_(ranks)
        work = all_reduce(bucket.comm, low, tag=bucket.index)

        def finish() -> None:
            work.wait()
            bucket.store(low.div_(ranks) if self.divides_sum else low)

        return finish


def built_in(kind: Any) -> BuiltIn:
    """The hook of that BuiltinCommHookType. Raises UsageError for others."""
    if kind not in KINDS:
        raise UsageError(f"the hook is {kind!r}; allowed: {', '.join(map(str, KINDS))}")
    return BuiltIn(str(kind), KINDS[kind])
