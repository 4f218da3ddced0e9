"""Fixtures for testing commands: as processes that do not outlive their test, refused, or
printed."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ringdp.cli.main import main

SECONDS = 600.0  # only a hang takes as long


@contextmanager
def processes() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A function that starts a process, in a group of its own, with its output in pipes."""
    started: list[subprocess.Popen[str]] = []

    def run(*command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=SECONDS)


@contextmanager
def edited(path: Path) -> Iterator[Any]:
    """The contents of a JSON file, which then has what the block makes of them."""
    found = json.loads(path.read_bytes())
    yield found
    path.write_text(json.dumps(found), encoding="utf-8")


def printed(show: Callable[[Console], object], width: int, *, terminal: bool = True) -> str:
    """What `show` prints on a terminal of that width, or to a file."""
    out = io.StringIO()
    show(Console(file=out, width=width, force_terminal=terminal, color_system=None))
    return out.getvalue()


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """start(*command): starts a process, see `processes`."""
    with processes() as start:
        yield start


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """refused(*arguments, message="..."): asserts exit code 2 and one line with the message on
    stderr."""

    def refused(*arguments: str, message: str) -> None:
        assert main([*arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert message in captured.err

    return refused
