CALLS: int
SITE_BYTES: int

def segment_size(ranks: int, depth: int, slab: int) -> int: ...
def abandon(core: Progress) -> None: ...

class Progress:
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
    ) -> None: ...
    def connect(self) -> None: ...
    def start(
        self,
        rows: int,
        row_count: int,
        bounds: int,
        chunks: int,
        scratch: int,
        buffer: int,
        dtype: int,
        op: int,
        number: int,
        kind: int,
        elements: int,
        site: bytes,
        background: bool,
        /,
    ) -> int: ...
    def exchange(
        self,
        collective: int,
        bounds: int,
        whole: int,
        part: int,
        dtype: int,
        op: int,
        number: int,
        kind: int,
        site: bytes,
        background: bool,
        /,
    ) -> int: ...
    def wait(self, ticket: int, seconds: float, /) -> bool: ...
    def failed(self) -> tuple[int, int, int, int, int, int, int, int, int] | None: ...
    def fail(self, kind: int, rank: int, /) -> None: ...
    def finished(self) -> int: ...
    def record(self, rank: int, /) -> tuple[int, int, int, int, int, int]: ...
    def call(self, rank: int, number: int, /) -> tuple[int, int, bytes] | None: ...
    def gone(self, rank: int, /) -> bool: ...
    def sent_bytes(self) -> int: ...
    def close(self) -> None: ...

class Watch:
    ranks: int
    failed: tuple[int, int, int]
    def __init__(self, fd: int) -> None: ...
    def record(self, rank: int, /) -> tuple[int, int, int, int, int, int]: ...
    def call(self, rank: int, number: int, /) -> tuple[int, int, bytes] | None: ...
