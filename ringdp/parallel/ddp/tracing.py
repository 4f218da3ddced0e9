"""A DistributedDataParallel in a trace: its forward, its backward, and each bucket's reduction.

forward    from the module's call to its outputs
backward   from the first gradient to the last, or to autograd's end if nothing is reduced
"""

from __future__ import annotations

from time import monotonic_ns

from torch.autograd import Variable

from ringdp.parallel.ddp.bucket import Bucket
from ringdp.parallel.ddp.reducer import Reducer
from ringdp.parallel.ddp.state import RESTING
from ringdp.parallel.tracing.patching import Patches
from ringdp.tape.recorder import Recorder, Tracer


class ReducerTracer(Tracer):
    def __init__(self, reducer: Reducer, recorder: Recorder) -> None:
        self._reducer, self._recorder = reducer, recorder
        self._forward: int | None = None  # start (ns)
        self._backward: int | None = None
        reducer.comm.label("gradients of DDP")
        self._patches = patches = Patches()
        patches.after(reducer, "begin_forward", self._forward_begins)
        patches.before(reducer, "end_forward", self._forward_ended)
        patches.before(reducer, "made", self._gradient_made)
        patches.timed(reducer, "_start", self._reduced)
        patches.before(reducer, "_end", self._backward_ended)
        patches.timed(
            reducer, "_land", lambda since: recorder.span("wait for reductions", "finish", since)
        )

    def end(self) -> None:
        self._patches.off()
        self._backward = None

    def _forward_begins(self) -> None:
        self._forward = monotonic_ns()

    def _forward_ended(self, _outputs: object) -> None:
        if self._forward is not None:
            self._recorder.span("forward", "forward", self._forward)
        self._forward = self._backward = None

    def _gradient_made(self, _index: int) -> None:
        if self._backward is None:
            self._backward = monotonic_ns()
            if self._reducer.state is RESTING:
                Variable._execution_engine.queue_callback(self._backward_ended)

    def _reduced(self, since: int, bucket: Bucket) -> None:
        self._recorder.span(f"reduce bucket {bucket.index}", "reduce", since)

    def _backward_ended(self) -> None:
        if self._backward is not None:
            self._recorder.span("backward", "backward", self._backward)
        self._backward = None
