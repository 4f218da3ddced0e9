"""What a trace sees of DistributedDataParallel: forward, backward, and when it reduces what.

forward    from the module's call to its outputs
backward   from the first gradient to the last; of one that reduces nothing, where autograd ends
"""

from __future__ import annotations

from time import monotonic_ns

from torch.autograd import Variable

from ringdp.comm import Communicator
from ringdp.parallel.ddp.bucket import Bucket
from ringdp.parallel.ddp.state import RESTING, State
from ringdp.parallel.tracing.patching import Patches, Watched
from ringdp.tape.recorder import Recorder


class Taped(Watched):
    """The part of a Reducer that its Watcher knows."""

    comm: Communicator
    state: State


class Watcher:
    """Around one reducer."""

    def __init__(self, reducer: Taped, recorder: Recorder) -> None:
        self._reducer, self._recorder = reducer, recorder
        self._forward: int | None = None  # since when
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
