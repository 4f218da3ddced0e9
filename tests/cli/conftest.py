"""Commands under test as processes, none of which outlives its test."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """start(*command): a process with its output in pipes, in a group of its own."""
    started: list[subprocess.Popen[str]] = []

    def run(*command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
