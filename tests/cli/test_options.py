"""Options of stages, their defaults, and writing of files."""

import json
import os
import select
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ringdp.cli.checks import check_writable
from ringdp.cli.files import write, write_json
from ringdp.cli.options import Options, check, parse_stages
from ringdp.errors import RingdpError


@pytest.mark.parametrize(
    ("given", "stages"),
    [("all", (0, 1, 2, 3)), ("3", (3,)), ("0,3", (0, 3)), ("3, 1,3", (3, 1))],
)
def test_stages_are_parsed(given: str, stages: tuple[int, ...]) -> None:
    assert parse_stages(given) == stages


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 16, 17, 64])
def test_the_default_batch_is_valid_for_every_number_of_ranks(ranks: int) -> None:
    options = Options(ranks=ranks)
    check(options)
    assert options.global_batch >= 16


def test_files_are_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, link = tmp_path / "found.json", tmp_path / "link.json"
    file.write_text("before", encoding="utf-8")
    file.chmod(0o600)
    link.symlink_to(file)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copymode", full)
        with pytest.raises(RingdpError, match="No space left"):
            write(link, "after")
    assert file.read_text(encoding="utf-8") == "before"
    write_json(link, [Options(ranks=3)])
    assert json.loads(file.read_bytes())[0]["ranks"] == 3
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o600
    assert sorted(tmp_path.iterdir()) == [file, link]


def test_a_pipe_is_not_opened_before_it_is_written(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        ends = select.poll()
        ends.register(reader)
        check_writable(pipe)
        assert ends.poll(0) == []


def test_pipes_are_written_in_place(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit(pipe.read_text)
        write(pipe, "found")
        assert read.result(60) == "found"
    assert pipe.is_fifo()
