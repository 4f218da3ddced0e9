"""Communication hooks: torch's contract for what DDP passes them and returns, and those built in.

    hook(state, bucket) -> torch.futures.Future of the reduced bucket
    hook(state, {name: buffer}) -> None, or futures to wait for at the end of backward

The gradients in the bucket are this rank's, not divided by n. torch's own hooks
(torch.distributed.algorithms.ddp_comm_hooks) run unchanged, over the torch.distributed group in
their state, not over ringdp. The built-in ones run over ringdp: torch's BuiltinCommHookType, and
mixed precision's.

    ALLREDUCE      divide every gradient by n, then sum: the same as without a hook
    FP16_COMPRESS  the same in float16
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch._C._distributed_c10d import GradBucket as _TorchsBucket

from ringdp.errors import ModelError, UsageError
from ringdp.parallel.ddp.bucket import Bucket
from ringdp.parallel.ddp.profiling import all_reduce

CONTRACT = {
    "bucket": (_TorchsBucket, "dist.GradBucket"),
    "return": (torch.futures.Future[Tensor], "torch.futures.Future[torch.Tensor]"),
}
BUILT_IN = {BuiltinCommHookType.ALLREDUCE: None, BuiltinCommHookType.FP16_COMPRESS: torch.float16}


class NotAHook(UsageError, TypeError):
    """A TypeError too, as torch raises."""

    def __init__(self, given: object) -> None:
        super().__init__(f"Communication hook must be callable; this one is {given!r}")


def fault(hook: Any) -> UsageError | None:
    """NotAHook, or another error if its annotations differ from the contract."""
    if not callable(hook):
        return NotAHook(hook)
    annotations = getattr(hook, "__annotations__", {})
    for what, (right, name) in CONTRACT.items():
        found = annotations.get(what, right)
        if not isinstance(found, str) and found != right:
            return UsageError(
                f"Communication hook: {what} annotation should be {name}. This one's is {found}"
            )
    return None


class GradBucket:
    """torch.distributed.GradBucket's interface; that class cannot be constructed in Python."""

    def __init__(self, bucket: Bucket, *, last: bool) -> None:
        self._slots, self._index, self._last = bucket.slots, bucket.index, last
        self._buffer = bucket.tensor()

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last bucket of this backward."""
        return self._last

    def buffer(self) -> Tensor:
        """All gradients, 1-D; complex ones as pairs of numbers; a sparse one as it is."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Views of the buffer in the parameters' shapes."""
        if self._buffer.is_sparse:
            return [self._buffer]
        flat = self._buffer
        if self._slots[0].parameter.is_complex():
            flat = torch.view_as_complex(flat.view(-1, 2))
        return [flat.as_strided(p.shape, stride, at) for p, at, stride in self._slots]

    def parameters(self) -> list[nn.Parameter]:
        return [slot.parameter for slot in self._slots]


class CommHook(NamedTuple):
    state: object
    call: Callable[[Any, Any], Any]

    @property
    def name(self) -> str:
        return getattr(self.call, "__qualname__", repr(self.call))

    def start(self, bucket: Bucket, *, last: bool) -> Callable[[], None]:
        """As `Bucket.start`."""
        future = self.call(self.state, GradBucket(bucket, last=last))
        name = self.name
        if not isinstance(future, torch._C.Future):  # what torch.futures.Future derives from
            raise ModelError(
                f"the communication hook {name}: callback must return a torch.futures.Future "
                f"object, but got {type(future).__name__}"
            )

        def finish() -> None:
            value = future.wait()
            tensors = value if isinstance(value, list | tuple) else [value]
            if len(tensors) != 1 or not isinstance(tensors[0], Tensor):
                raise ModelError(f"the communication hook {name} must give one tensor, not {value}")
            bucket.store(tensors[0])

        return finish


class BuiltIn(NamedTuple):
    """`dtype`: of the sum; None is the bucket's. `divides_sum`: the sum is divided by n, not the
    gradients."""

    name: str
    dtype: torch.dtype | None
    divides_sum: bool = False

    def start(self, bucket: Bucket, *, last: bool) -> Callable[[], object]:
        """As `Bucket.start`."""
        gradients, ranks = bucket.tensor(), bucket.comm.size
        if self.dtype is None and not self.divides_sum:
            bucket.store(gradients.div_(ranks))
            return bucket.start()
        if gradients.is_sparse:
            raise UsageError(f"{self.name} takes no sparse gradients: register ALLREDUCE")
        low = gradients.to(self.dtype)
        if not self.divides_sum:
            low.div_(ranks)
        wait = all_reduce(bucket.comm, low, tag=bucket.index)

        def finish() -> None:
            wait()
            bucket.store(low.div_(ranks) if self.divides_sum else low)

        return finish


Hook = CommHook | BuiltIn


def built_in(kind: Any) -> BuiltIn:
    """The hook of that BuiltinCommHookType. Raises UsageError for others."""
    if kind not in BUILT_IN:
        raise UsageError(f"the hook is {kind!r}; allowed: {', '.join(map(str, BUILT_IN))}")
    return BuiltIn(str(kind), BUILT_IN[kind])


class BufferHook(NamedTuple):
    """Synchronizes the model's buffers, instead of rank 0's broadcast."""

    state: object
    call: Callable[[Any, dict[str, Tensor]], Any]
    before: bool  # runs before forward, or after it

    def run(self, buffers: dict[str, Tensor]) -> list[Callable[[], object]]:
        """Returns functions to call at the end of backward."""
        with torch.no_grad():
            futures = self.call(self.state, buffers)
        return [future.wait for future in futures or ()]
