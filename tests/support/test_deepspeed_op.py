"""Locks on an extension's build: a stale one is removed, a held one is not, and one that is gone fails nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from tests.support.deepspeed_op import lock_may_be_gone, remove_stale_locks


@pytest.fixture
def baton(tmp_path: Path) -> FileBaton:
    folder = tmp_path / "deepspeed_op"
    folder.mkdir()
    baton = FileBaton(str(folder / "lock"))
    assert baton.try_acquire()
    Path(baton.lock_file_path).unlink()
    return baton


def test_a_lock_that_is_gone_after_the_build(baton: FileBaton) -> None:
    with lock_may_be_gone():
        baton.release()


def test_a_build_that_failed_is_an_error_without_its_lock_too(baton: FileBaton) -> None:
    with pytest.raises(FileNotFoundError) as raised, lock_may_be_gone():
        try:
            raise RuntimeError("the compiler says no")
        finally:
            baton.release()
    assert isinstance(raised.value.__context__, RuntimeError)


def test_other_files_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), lock_may_be_gone():
        (tmp_path / "deepspeed_op" / "main.cpp").read_text()


def test_only_a_lock_that_no_process_holds_is_removed(tmp_path: Path) -> None:
    """The file of a process that was killed is there and open nowhere."""
    held, stale = (tmp_path / name / "lock" for name in ("deepspeed_held", "deepspeed_stale"))
    for lock in (held, stale):
        lock.parent.mkdir()
    baton = FileBaton(str(held))
    assert baton.try_acquire()
    stale.touch()
    remove_stale_locks(tmp_path)
    assert held.exists() and not stale.exists()
    baton.release()
    assert not held.exists()
