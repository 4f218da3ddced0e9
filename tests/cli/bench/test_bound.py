"""The lower bound of a collective's time, worked out by hand, and the bytes that must move."""

import pytest

from ringdp.cli.bench.bound import Speeds, bound
from ringdp.cli.bench.cases import CASES, Moves

SPEEDS = Speeds(fold=5.0, read=2.0, pull=3.0, copy=1.0)


def test_the_bound_is_the_sum_of_all_passes() -> None:
    moves = Moves(folded=0.25, read=0.5, pulled=0.75, copied=1.0)
    assert bound(moves, 4, 4, 100, SPEEDS) == 100 * (0.25 * 5 + 0.5 * 2 + 0.75 * 3 + 1)


def test_on_shared_cores_ranks_add_up_and_read_from_the_cache() -> None:
    moves = Moves(folded=0.5, pulled=0.5)
    assert bound(moves, 2, 2, 100, SPEEDS) == 400
    assert bound(moves, 3, 2, 100, SPEEDS) == 2 * 100 * SPEEDS.copy
    assert bound(moves, 3, 2, 100, SPEEDS, lap=True) == 100 * SPEEDS.copy  # one works at a time


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_the_bytes_that_must_move(n: int) -> None:
    def moves(name: str, *, registered: bool = False) -> Moves:
        return CASES[name].moves(n, registered)

    others = (n - 1) / n
    for name in ("all_reduce", "reduce_scatter"):  # n-1 inputs of the part that a rank folds
        found = moves(name, registered=True)
        assert found.folded + found.read + found.pulled == pytest.approx(others)
    assert moves("all_reduce").pulled == others
    assert moves("all_gather") == Moves(pulled=others, copied=1 / n)
    units = n * (n + 1) // 2  # an uneven part of rank r has r + 1 of them
    assert moves("all_gather_v") == Moves(pulled=(units - 1) / units, copied=1 / units)
    assert moves("scatter_v").pulled == n / units
    # Registered buffers never need more bytes moved than private ones.
    for case in CASES.values():
        private, shared = case.moves(n, False), case.moves(n, True)
        assert all(s <= p for s, p in zip(shared, private, strict=True))
