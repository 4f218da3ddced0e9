"""The bound by hand, and the bytes that each collective cannot avoid."""

import pytest

from ringdp.cli.bench.bound import Speeds, bound
from ringdp.cli.bench.cases import CASES, Moves

SPEEDS = Speeds(pull=3.0, read=2.0, copy=1.0)


def test_fetched_and_written_bytes_are_one_pass() -> None:
    assert bound(Moves(0.75, 0.25), 4, 4, 100, SPEEDS) == 100 * (0.25 * 3 + 0.5 * 2)
    assert bound(Moves(0.5, 1.0), 2, 2, 100, SPEEDS) == 100 * 0.5 * 3
    assert bound(Moves(0.5, 0.5, copied=0.5), 2, 2, 100, SPEEDS) == 100 * (0.5 * 3 + 0.5 * 1)


def test_ranks_that_share_a_core_add_up_and_find_bytes_near() -> None:
    alone = bound(Moves(1.0, 1.0), 2, 2, 100, SPEEDS)
    shared = bound(Moves(1.0, 1.0), 3, 2, 100, SPEEDS)
    assert alone == 300
    assert shared == 2 * 100 * SPEEDS.copy


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_what_must_move(n: int) -> None:
    def moves(name: str, *, registered: bool = False) -> Moves:
        return CASES[name].moves(n, registered)

    q = (n - 1) / n
    assert moves("all_reduce") == Moves(2 * q, 1)
    assert moves("all_reduce", registered=True) == Moves(q, 1)
    assert moves("reduce_scatter") == Moves(q, 1 / n)
    assert moves("all_gather") == Moves(q, q, 1 / n)
    # In shared memory nothing needs more than in private memory.
    for case in CASES.values():
        private, shared = case.moves(n, False), case.moves(n, True)
        assert all(s <= p for s, p in zip(shared, private, strict=True))
