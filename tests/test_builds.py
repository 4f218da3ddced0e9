"""The builds of the tests' C++ programs end with the session."""

from pathlib import Path

import pytest

from tests import builds
from tests.waiting import wait_until


def test_a_session_that_ends_does_not_wait_for_what_a_compiler_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """g++ starts the compiler proper, which has g++'s standard error, too."""
    driver, started = tmp_path / "driver", tmp_path / "started"
    driver.write_text(f"#!/bin/sh\nsh -c 'touch {started}; sleep 3600'\ntrue\n", encoding="utf-8")
    driver.chmod(0o700)
    monkeypatch.setattr(builds, "CXX", str(driver))
    made = builds.Builds(tmp_path / "builds")
    made.begin({"program": builds.Build("any.cpp", ())})
    wait_until(started.exists)
    made.close()
