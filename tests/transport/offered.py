"""The parts of tests/comm that must hold for every transport."""

from __future__ import annotations

from ringdp import Communicator
from tests.comm import test_arithmetic, test_forms, test_groups, test_messages


def offered(comm: Communicator) -> None:
    test_forms.check_moving(comm, 10)
    test_forms.check_summing(comm, 10)
    test_arithmetic.check_averages_are_rounded_once(comm)
    test_forms.check_inference_mode(comm)
    test_messages.check_exchange(comm)
    test_messages.check_any_source(comm)
    test_messages.check_messages_during_collectives(comm)
    test_groups.check_split.__wrapped__(comm)
    test_groups.check_group(comm)
