from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Generic, TypeVar

from torch import Tensor

T = TypeVar("T")

CALLS: int
SLICE: float
SITE_BYTES: int
CALL_CELLS: int

def segment_size(ranks: int, depth: int, slab: int) -> int: ...
def mailbox_size(ranks: int, depth: int, slab: int) -> int: ...

class Driver:
    def __init__(self, functions: Sequence[int | None]) -> None: ...

class Launch:
    def __init__(
        self,
        driver: Driver,
        function: int,
        programs: int,
        threads: int,
        shared: int,
        kinds: str,
        values: tuple[Any, ...],
    ) -> None: ...
    def run(self, stream: int, late: tuple[Any, ...]) -> bool: ...

class Repeats:
    def __init__(
        self, table: object, tensor: type, parameter: type, calls: int, bytes: int
    ) -> None: ...
    def again(
        self, tensors: list[Tensor], offsets: Sequence[int] | None, late: tuple[Any, ...]
    ) -> bool: ...
    def keep(
        self,
        tensors: list[Tensor],
        offsets: Sequence[int] | None,
        launches: Sequence[Launch | None],
        held: Sequence[Tensor] = ...,
    ) -> None: ...

def use_openmp(parallel: int, thread: int) -> None: ...

class Kernels:
    """The last argument of each is the most threads to use."""

    def __init__(self, table: object, tensor: type, parameter: type) -> None: ...
    def flatten(
        self,
        tensors: Sequence[Tensor],
        out: Tensor,
        offsets: Sequence[int],
        scale: float,
        n: int,
        /,
    ) -> bool: ...
    def unflatten(
        self,
        flat: Tensor,
        tensors: Sequence[Tensor],
        offsets: Sequence[int],
        scale: float,
        n: int,
        /,
    ) -> bool: ...
    def unscale(self, x: Tensor, out: Tensor, found: Tensor, scale: float, n: int, /) -> bool: ...
    def fold(self, parts: Tensor, out: Tensor, own: Tensor | None, at: int, n: int, /) -> bool: ...
    def stochastic_round(self, x: Tensor, out: Tensor, hash: Sequence[int], n: int, /) -> bool: ...
    def adamw(
        self,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        copy: Tensor | None,
        factors: Sequence[float],
        n: int,
        /,
    ) -> bool: ...
    def squared_norm(self, tensors: Sequence[Tensor], n: int, /) -> float | None: ...

def abandon(mailbox: Mailbox, progress: Progress) -> None: ...
def fail_at_exit() -> None: ...

class Records:
    def record(self, rank: int, /) -> tuple[int, int, int, int, int, int]: ...
    def call(self, rank: int, number: int, /) -> tuple[int, int, int, bytes] | None: ...
    def message(self, rank: int, /) -> tuple[int, int, int, bytes] | None: ...

class Progress(Records):
    @property
    def issued(self) -> int: ...
    def __init__(
        self,
        fd: int,
        rank: int,
        ranks: int,
        depth: int,
        slab: int,
        token: int,
        arena: int,
        arena_bytes: int,
        latency: float,
        bandwidth: float,
        stride: int,
    ) -> None: ...
    def connect(self) -> None: ...
    def wait(self, ticket: int, seconds: float, /) -> bool: ...
    def failed(self) -> tuple[int, int, int, int, int, int, int, int, int, str] | None: ...
    def fail(self, kind: int, rank: int, /) -> None: ...
    def finished(self) -> int: ...
    def left_alone(self) -> bool: ...
    def waits_for_message(self, number: int, kind: int, elements: int, site: bytes, /) -> None: ...
    def has_message(self) -> None: ...
    def sent_bytes(self) -> int: ...
    def trace(self, entries: int, /) -> None: ...
    def untrace(self) -> None: ...
    def tape(self) -> tuple[bytes, bytes, int]: ...
    def close(self) -> None: ...

class Prepared:
    @staticmethod
    def exchange(
        core: Progress,
        collective: int,
        root: int,
        bounds: Sequence[int],
        received: Sequence[int],
        dtype: int,
        op: int,
        kind: int,
        kept: dict[int, object],
        /,
    ) -> Prepared: ...
    @staticmethod
    def program(
        core: Progress,
        program: object,
        rows: int,
        count: int,
        chunks: int,
        scratch: int,
        changes: bool,
        bounds: Sequence[int],
        dtype: int,
        op: int,
        kind: int,
        elements: int,
        kept: dict[int, object],
        /,
    ) -> Prepared: ...
    def start(self, whole: Tensor | None, part: Tensor | None, site: bytes, /) -> int: ...
    def run(self, whole: Tensor | None, part: Tensor | None, site: bytes, /) -> int: ...

class Ready:
    messages: int
    told: bool
    def __init__(
        self,
        rank: int,
        ranks: int,
        table: object,
        tensor: type,
        parameter: type,
        mailbox: Mailbox,
    ) -> None: ...
    def learn(self, ended: object, token: Tensor, kinds: list[int], /) -> None: ...
    def remember(
        self,
        method: int,
        dtype: int,
        elements: int,
        op: str,
        root: int,
        tag: int,
        algorithm: object,
        bounds: Sequence[int],
        prepared: object,
        /,
    ) -> None: ...
    def forget(self) -> None: ...

class Grouping(Generic[T]):
    def __init__(self, comm: object, group: T, waits: bool) -> None: ...
    def __enter__(self) -> T: ...
    def __exit__(self, *error: object) -> None: ...

def call_site() -> bytes:
    """Return the file:line of the innermost frame that is the user's."""

def learn_sites(line: Callable[[FrameType], bytes], nowhere: bytes, /) -> None:
    """`line` returns a frame's file:line, empty if it is not the user's."""

class Repeated:
    __wrapped__: object
    def __init__(self, number: int, method: object, /) -> None: ...

class Watch(Records):
    ranks: int
    failed: tuple[int, int]
    def __init__(self, fd: int) -> None: ...

class Mailbox:
    def __init__(self, progress: Progress, fd: int) -> None: ...
    def send(
        self,
        data: int,
        size: int,
        kind: int,
        to: int,
        background: bool,
        kept: dict[int, object],
        used: object,
        /,
    ) -> int: ...
    def receive(
        self,
        data: int,
        size: int,
        kind: int,
        from_: int,
        source: int,
        background: bool,
        kept: dict[int, object],
        used: object,
        /,
    ) -> int: ...
    def wait(self, ticket: int, seconds: float, /) -> bool: ...
    def ended(self) -> list[int]: ...
    def close(self) -> None: ...
