"""The bound by hand, and the bytes that each collective cannot avoid."""

import pytest

from ringdp.cli.bench.bound import Speeds, bound
from ringdp.cli.bench.cases import CASES, Moves

SPEEDS = Speeds(fold=5.0, read=2.0, pull=3.0, copy=1.0)


def test_passes_add_up() -> None:
    moves = Moves(folded=0.25, read=0.5, pulled=0.75, copied=1.0)
    assert bound(moves, 4, 4, 100, SPEEDS) == 100 * (0.25 * 5 + 0.5 * 2 + 0.75 * 3 + 1)


def test_ranks_that_share_a_core_add_up_and_find_bytes_near() -> None:
    moves = Moves(folded=0.5, pulled=0.5)
    assert bound(moves, 2, 2, 100, SPEEDS) == 400
    assert bound(moves, 3, 2, 100, SPEEDS) == 2 * 100 * SPEEDS.copy


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_what_must_move(n: int) -> None:
    def moves(name: str, *, registered: bool = False) -> Moves:
        return CASES[name].moves(n, registered)

    others = (n - 1) / n
    for name in ("all_reduce", "reduce_scatter"):  # n-1 inputs of what a rank folds
        found = moves(name, registered=True)
        assert found.folded + found.read + found.pulled == pytest.approx(others)
    assert moves("all_reduce").pulled == others
    assert moves("all_gather") == Moves(pulled=others, copied=1 / n)
    # In shared memory nothing needs more than in private memory.
    for case in CASES.values():
        private, shared = case.moves(n, False), case.moves(n, True)
        assert all(s <= p for s, p in zip(shared, private, strict=True))
