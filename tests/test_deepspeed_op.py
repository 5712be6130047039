"""Of the errors of an extension's build, the one about a lock that another run has removed is no reason to fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from tests.deepspeed_op import lock_may_be_gone


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
