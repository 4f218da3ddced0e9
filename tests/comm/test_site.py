"""The user's file:line of a call: not one of ringdp's frames, cut to size, cached within limits."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from types import CodeType
from typing import Any

import pytest
import torch

from ringdp import Communicator
from ringdp.comm import call
from ringdp.comm.call import place
from ringdp.transport.records import SITE_BYTES, call_site
from tests.ranks import on_ranks


def call_site_in(
    file: str, lines: int = 0, codes: list[weakref.ref[CodeType]] | None = None
) -> bytes:
    """call_site, called on line `lines` + 2 of another file. `codes` gets the caller's code."""
    names: dict[str, object] = {}
    code = "\n" * lines + "def f(call_site):\n    return call_site()"
    exec(compile(code, file, "exec"), {}, names)
    if codes is not None:
        codes.append(weakref.ref(names["f"].__code__))  # type: ignore[attr-defined]
    return names["f"](call_site)  # type: ignore[operator]


def test_call_site_is_the_line_of_the_call():
    first = call_site()  # from here
    assert place(first).endswith(f"/test_site.py:{first_line()}")
    assert first is not call_site(), "the call is on another line"
    assert len(first) == SITE_BYTES


def first_line() -> int:
    with open(__file__, encoding="utf-8") as file:
        return next(n for n, line in enumerate(file, 1) if line.endswith("# from here\n"))


def test_frames_of_ringdp_and_torch_are_skipped():
    ours, torchs = call.__file__, torch.__file__
    for file in (ours, torchs, "<frozen importlib>"):
        assert "/test_site.py:" in place(call_site_in(file))


def test_leaving_a_context_manager_of_ringdp_is_the_users_line():
    names: dict[str, Any] = {}
    body = "def f(found, call_site):\n    yield\n    found.append(call_site())"
    exec(compile(body, call.__file__, "exec"), names)
    found: list[bytes] = []
    with contextlib.contextmanager(names["f"])(found, call_site):
        line = sys._getframe().f_lineno
    assert place(found[0]).endswith((f"/test_site.py:{line - 1}", f"/test_site.py:{line}"))


def test_a_long_path_is_cut_at_its_head():
    path = "/very" * 50 + "/train.py"
    site = call_site_in(path)
    assert len(site) == SITE_BYTES
    assert place(site).startswith("...")
    assert place(site).endswith("/very/very/train.py:2")


def test_the_cache_of_lines_is_bounded():
    codes: list[weakref.ref[CodeType]] = []
    for lines in range(3000):
        assert place(call_site_in("made", lines, codes)) == f"made:{lines + 2}"
    assert sum(code() is not None for code in codes) <= 1024


def test_a_thread_without_user_code_is_described(monkeypatch):
    monkeypatch.setattr(call, "_OURS", ("/",))
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(call_site()))
    thread.start()
    thread.join()
    assert place(found[0]) == "a thread without the user's code"


@pytest.mark.process
@on_ranks(1)
def test_a_repeated_call_has_its_own_line(comm: Communicator) -> None:
    x = torch.ones(4)
    ours = compile("def f(comm, x):\n    comm.all_reduce(x)", call.__file__, "exec")
    names: dict[str, object] = {}
    exec(ours, {}, names)

    def check(line: int) -> None:
        _, _, _, site = comm._transport.call(0, comm.issued - 1)
        assert place(site).endswith(f"/test_site.py:{line}")

    for _ in range(3):
        comm.all_reduce(x)
        check(sys._getframe().f_lineno - 1)
        comm.all_reduce(x)
        check(sys._getframe().f_lineno - 1)
        names["f"](comm, x)  # type: ignore[operator]
        check(sys._getframe().f_lineno - 1)
