"""The demo's text and batches: a batch depends on (seed, step) only, and is the same on every
rank."""

from pathlib import Path

import numpy as np
import pytest

from ringdp.cli import text
from ringdp.errors import UsageError

DATA = bytes(range(256)) * 4


def test_the_default_text_is_the_standard_library() -> None:
    found = text.load(None, 1000)
    assert 1_000_000 < len(found.data) <= text.LIMIT
    assert found.files > 100
    assert found == text.load(None, 1000)


def test_a_directory_is_joined_in_path_order_without_binaries(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z").write_bytes(b"first ")
    (tmp_path / "c").write_bytes(b"\0binary")
    found = text.load(tmp_path, 1)
    assert (found.data, found.files) == (b"first second", 2)


def test_a_named_file_may_be_binary(tmp_path: Path) -> None:
    file = tmp_path / "any"
    file.write_bytes(b"\0\1\2")
    assert text.load(file, 3).data == b"\0\1\2"
    with pytest.raises(UsageError, match="at least 4 bytes"):
        text.load(file, 4)


def test_a_batch_depends_on_seed_and_step_only() -> None:
    first = text.batch(DATA, 0, 3, 8, 16)
    assert np.array_equal(first, text.batch(DATA, 0, 3, 8, 16))
    assert not np.array_equal(first, text.batch(DATA, 0, 4, 8, 16))
    assert not np.array_equal(first, text.batch(DATA, 1, 3, 8, 16))


def test_rows_are_windows_of_the_text() -> None:
    rows = text.batch(DATA, 5, 0, 32, 16)
    assert rows.shape == (32, 17)
    assert all(bytes(row.astype(np.uint8)) in DATA for row in rows)


def test_the_shortest_text_gives_its_only_window() -> None:
    assert text.batch(b"abc", 0, 0, 2, 2).tolist() == [[97, 98, 99]] * 2
