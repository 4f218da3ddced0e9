"""Bench rows with fixed numbers."""

from ringdp.cli.bench.rows import Row


def row(**changes: object) -> Row:
    fields: dict[str, object] = {
        "collective": "all_reduce",
        "algorithm": "auto",
        "transport": "shm",
        "registered": False,
        "ranks": 2,
        "bytes": 1 << 20,
        "dtype": "float32",
        "min_us": 90.0,
        "p20_us": 95.0,
        "p50_us": 100.0,
        "p80_us": 110.0,
        "algbw": 10.486,
        "busbw": 10.486,
        "predicted_us": 99.0,
        "bound_us": 50.0,
        "wrong": 0,
    }
    return Row(**(fields | changes))


def peer(name: str, p50: float, size: int = 1 << 20) -> Row:
    return row(algorithm=name, transport=name, p50_us=p50, bytes=size, predicted_us=None)
