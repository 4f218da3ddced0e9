"""What threads wait at, and what they hear from one another, though Ctrl-C may come at any step."""

from __future__ import annotations

import weakref
from queue import Empty
from threading import Thread

import pytest

from ringdp.transport.threads import Answer, Bell, complete

SOON = 0.01  # s


def test_a_bell_wakes_all_who_wait_and_those_go_on_for_whom_it_holds():
    bell, there = Bell(), list[int]()
    done = list[int]()

    def wait(number: int) -> None:
        bell.wait_for(lambda: number in there)
        done.append(number)

    threads = [Thread(target=wait, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for number in (1, 0, 2):
        there.append(number)
        bell.ring()
        threads[number].join()
    assert done == [1, 0, 2]


def test_who_waits_at_a_bell_no_longer_than_asked_leaves_nothing_there():
    bell = Bell()
    bell.wait_for(lambda: False, SOON)
    bell.wait_for(lambda: False, 0.0)
    assert not bell._waiting


def test_who_leaves_a_bell_by_ctrl_c_keeps_nobody_from_it():
    bell, asked = Bell(), list[bool]()

    def interrupted() -> bool:
        asked.append(True)
        if len(asked) == 2:  # when it waits, as far as others know
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        bell.wait_for(interrupted)
    thread = Thread(target=bell.wait_for, args=(lambda: len(asked) > 2,))
    thread.start()
    asked.append(True)
    bell.ring()
    thread.join()
    assert not bell._waiting


def test_an_answer_is_what_is_found_or_the_error():
    found, failed = Answer[int](), Answer[int]()
    with pytest.raises(Empty):
        found.get(SOON)
    found.find(lambda: 7)
    failed.find(lambda: 1 // 0)
    assert found.get(SOON) == 7
    with pytest.raises(ZeroDivisionError):
        failed.get(SOON)


def test_an_end_that_ctrl_c_has_cut_short_comes_again():
    class Held:
        pass

    held, ends = Held(), iter((KeyboardInterrupt, None))

    def end() -> None:
        if error := next(ends):
            raise error

    at_end = weakref.finalize(held, end)
    with pytest.raises(KeyboardInterrupt):
        complete(at_end)
    complete(at_end)
    assert not at_end.alive
    complete(at_end)
    assert next(ends, "none is left") == "none is left"
