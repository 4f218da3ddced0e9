"""A save that fails on any rank, or as it commits, keeps the previous checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import ringdp
from ringdp import CheckpointError, Communicator
from ringdp.parallel.checkpoint import index
from tests.parallel.checkpoint.test_state import Vector, make
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


# ---- errors of one rank


class FailingExtraState(Vector):
    """Its extra state raises an error without a message on rank 1."""

    at = ""
    rank = 0

    def get_extra_state(self) -> Any:
        return self._state("get")

    def set_extra_state(self, state: Any) -> None:
        self._state("set")

    def _state(self, at: str) -> int:
        if self.at == at and self.rank == 1:
            raise KeyError
        return 1


@on_ranks(2)
def test_any_error_on_one_rank_is_raised_on_all(comm: Communicator, tmp_path: Path) -> None:
    model = FailingExtraState()
    model.rank = comm.rank
    engine = ringdp.shard(model, stage=3, comm=comm)
    ringdp.save(tmp_path, engine, extra={"save": 1})
    before = os.listdir(tmp_path)
    for at, attempt in (("get", ringdp.save), ("set", ringdp.load)):
        model.at = at
        with pytest.raises(CheckpointError, match=r"; rank 1: KeyError: $") as error:
            attempt(tmp_path, engine)
        assert isinstance(error.value.__cause__, KeyError if comm.rank == 1 else type(None))
        comm.barrier()
        assert os.listdir(tmp_path) == before
    engine.close()


# ---- commits that fail


@on_ranks(2)
def test_a_failing_commit_leaves_no_files(comm: Communicator, tmp_path: Path) -> None:
    _, engine, optimizer = make(comm, 3)
    save = ringdp.save
    save(tmp_path, engine, optimizer, extra={"save": 1})
    before = sorted(os.listdir(tmp_path))

    def no_replace(*_: Any) -> None:
        raise OSError("no rename")

    message = r"not written; rank 0: OSError: no rename"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", no_replace)
        for _ in range(2):
            with pytest.raises(CheckpointError, match=message):
                save(tmp_path, engine, optimizer, extra={"save": 2})
    comm.barrier()
    assert sorted(os.listdir(tmp_path)) == before
    comm.barrier()
    aside = tmp_path / "index.json.new"
    if comm.rank == 0:
        aside.mkdir()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"not written; rank 0: IsADirectoryError"):
            save(tmp_path, engine, optimizer, extra={"save": 2})
    assert ringdp.load(tmp_path, engine, optimizer) == {"save": 1}
    assert sorted(os.listdir(tmp_path)) == sorted([*before, aside.name])
    comm.barrier()
    if comm.rank == 0:
        aside.rmdir()

    def no_sync(of: Path) -> None:
        if of == tmp_path:
            raise OSError("no sync")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "sync_directory", no_sync)
        with pytest.raises(CheckpointError, match="is written, but what it replaces could not"):
            save(tmp_path, engine, optimizer, extra={"save": 3})
    comm.barrier()
    assert ringdp.load(tmp_path, engine, optimizer) == {"save": 3}
    assert len(list(tmp_path.glob("data-*"))) == 2, "after a crash the disk may have either index"
    save(tmp_path, engine, optimizer, extra={"save": 4})
    assert len(os.listdir(tmp_path)) == len(before)
    engine.close()


@on_ranks(2)
def test_no_error_after_the_commit_removes_the_checkpoint(
    comm: Communicator, tmp_path: Path
) -> None:
    """As of a disk that becomes read-only."""
    _, engine, optimizer = make(comm, 3)

    def replace(*paths: Any, really: Any = os.replace) -> None:
        really(*paths)
        patch.setattr(Path, "unlink", unlink)

    def unlink(*_: Any, **__: Any) -> None:
        raise OSError("read-only")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", replace)
        ringdp.save(tmp_path, engine, optimizer, extra={"save": 1})
    assert ringdp.load(tmp_path, engine, optimizer) == {"save": 1}
    engine.close()
