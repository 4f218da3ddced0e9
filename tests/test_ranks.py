"""A test on ranks fails when one of them does, and shows that rank's error first."""

import pytest

from ringdp import Communicator


def wait_for_a_rank_that_fails(comm: Communicator) -> None:
    assert [comm.rank] == [0]
    comm.barrier()


@pytest.mark.process
@pytest.mark.parametrize("pool", ["fresh_ranks", "forked"])
def test_a_failed_assert_of_one_rank_shows_its_values(
    request: pytest.FixtureRequest, pool: str
) -> None:
    ranks = request.getfixturevalue(pool)(2)
    with pytest.raises(AssertionError, match=r"^rank 1 raised") as error:
        ranks(wait_for_a_rank_that_fails)
    assert "AssertionError: assert [1] == [0]" in str(error.value).partition("rank 0 raised")[0]
