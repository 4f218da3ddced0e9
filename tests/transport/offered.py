"""The parts of tests/comm that must hold for every transport."""

from __future__ import annotations

from ringdp import Communicator
from tests.comm import test_collectives, test_forms, test_groups, test_messages


def offered(comm: Communicator) -> None:
    test_forms.moved(comm, 10)
    test_forms.added(comm, 10)
    test_collectives.rounded_once(comm)
    test_forms.begun_in_inference_mode(comm)
    test_messages.exchange(comm)
    test_messages.anybody(comm)
    test_messages.beside_collectives(comm)
    test_groups.parts.__wrapped__(comm)
    test_groups.together(comm)
