"""Makes a test file's failed asserts show their values, as pytest's own process does: a process of
ranks imports this before any test file."""

import pytest

pytest.Config.fromdictargs({}, ["--noconftest", "--capture=no"])
