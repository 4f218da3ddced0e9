"""A test on ranks fails when one of them does, and shows that rank's error first."""

from pathlib import Path

import pytest

from ringdp import Communicator
from tests import scripts
from tests.transport.over import over


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


@pytest.mark.process
def test_others_do_not_wait_for_a_rank_that_has_failed_over_another_transport(fresh_ranks) -> None:
    found = fresh_ranks(2).outcomes(over, "peer-host", wait_for_a_rank_that_fails)
    assert [(end.rank, end.error) for end in found] == [(1, "AssertionError"), (0, "PeerLost")]


@pytest.mark.process
def test_a_script_that_fails_on_one_rank_does_not_wait_for_the_other(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nassert os.environ['RANK'] == '0', 'the cause'\ntime.sleep(3600)\n",
        encoding="utf-8",
    )
    with pytest.raises(AssertionError, match=r"exit codes \[None, 1\](.|\n)*: the cause"):
        scripts.run(script)
