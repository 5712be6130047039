"""One copy for several processes: never half of one, never another one, whoever dies or damages what on the way."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from disco_accel.errors import ConfigError
from disco_accel.native import rendezvous, shared_copies
from disco_accel.native.file_arena import FileArena, whole_pages
from disco_accel.native.host_memory import HostMemory
from disco_accel.native.rendezvous import NotSharedError, Rendezvous, runs, this_process
from disco_accel.native.shared_copies import key_of, open_copy, shared_copy
from disco_accel.native.shared_memory import READ_ONLY, WHOLE, add_seals, create_file
from tests.native.sharers import Shared, child, weights

PAGE = os.sysconf("SC_PAGE_SIZE")
NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "weights"


def test_processes_map_one_copy_and_keep_what_they_write(folder: Path) -> None:
    """The second writes nothing and is found by the third, when the first is gone; a write is the writer's alone."""
    first = Shared(folder)
    assert first.is_new and not first.said
    inode = os.fstat(first.arena.file).st_ino

    def second() -> Shared:
        mine = Shared(folder)
        assert not mine.is_new and os.fstat(mine.arena.file).st_ino == inode
        mine.tensors[1][7] += 1
        assert mine.arena.differs(mine.tensors) == [False, True, False, False, False, False]
        mine.tensors[1][7] -= 1
        assert not any(mine.arena.differs(mine.tensors)), "the bytes are the file's again"
        mine.tensors[1].fill_(-1)
        return mine

    with child(second) as wait:
        assert wait() == -1
        assert torch.equal(first.tensors[1], weights()[1]) and not any(first.arena.differs(first.tensors))
        del first
        gc.collect()
        third = Shared(folder)
        assert not third.is_new and os.fstat(third.arena.file).st_ino == inode
    del third
    gc.collect()
    assert Shared(folder).is_new, "nobody holds it any more"


def test_the_key_is_the_content_and_the_layout(folder: Path) -> None:
    """Any flipped bit, another dtype, shape, stride or order is another copy; a path or a name plays no part."""
    base = weights()
    keys = {key_of(base)}
    assert key_of(weights()) in keys
    others = [base[::-1], base[:-1], [base[0].view(30, 40), *base[1:]], [base[0].view(torch.int32), *base[1:]]]
    others += [[base[0].clone().t().contiguous().t(), *base[1:]]]
    chosen = random.Random(0)
    for _ in range(300):
        changed = weights()
        target = chosen.choice([changed[0], changed[1], changed[5]]).view(-1).view(torch.uint8).numpy()
        target[chosen.randrange(len(target))] ^= 1 << chosen.randrange(8)
        others.append(changed)
    keys |= {key_of(tensors) for tensors in others}
    assert len(keys) == 1 + len({_bytes(tensors) for tensors in others} - {_bytes(base)})
    assert len(keys) > 250


def _bytes(tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    return tuple(
        (t.dtype, t.shape, t.stride(), t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()) for t in tensors
    )


def _list_of(folder: Path) -> Path:
    (path,) = folder.glob("*.json")
    return path


def test_a_damaged_list_costs_a_copy_and_no_byte(folder: Path) -> None:
    """One flipped bit anywhere: the same copy is found, or one is made anew; ``Shared`` compares all bytes."""
    first = Shared(folder)
    good, chosen, anew = _list_of(folder).read_bytes(), random.Random(0), 0
    for at in range(len(good)):
        damaged = bytearray(good)
        damaged[at] ^= 1 << chosen.randrange(8)
        _list_of(folder).write_bytes(damaged)
        found = Shared(folder)
        anew += found.is_new
        assert all("is damaged" in line for line in found.said)
    assert anew > len(good) // 2
    for content in (
        b"",
        b"\xff\xfe",
        b"[]",
        b"[" * 200_000,
        b"1" * (2 << 20),
        b"null",
        b'{"version": 1, "holders": [[true, 0, 0]]}',
    ):
        _list_of(folder).write_bytes(content)
        Shared(folder)
    path = _list_of(folder)
    for make in (lambda: path.symlink_to("/etc/passwd"), lambda: os.mkfifo(path), path.mkdir):
        path.unlink()
        make()
        found = Shared(folder)
        assert found.is_new and "is damaged" in found.said[0]
    assert "other processes will not find" in found.said[1], "a folder is in the list's place"
    assert torch.equal(first.tensors[1], weights()[1])


def test_nothing_but_the_whole_copy_is_ever_mapped() -> None:
    """What a list may point to: other files in memory, of the right size, unsealed, with another key; files on disk,
    pipes, terminals, processes that are gone, another user's or nobody's."""
    nbytes, key = whole_pages(9000), "ab" * 16
    made = []

    def memory(name: str, size: int, page: bytes, seals: Any) -> int:
        file = create_file(name, size)
        os.pwrite(file, page, nbytes)
        assert add_seals(file, seals)
        made.append(file)
        return file

    page, name = shared_copies._last_page(key, nbytes), shared_copies._NAME
    right = memory(name, nbytes + PAGE, page, READ_ONLY)
    wrong = [
        memory(name, nbytes + PAGE, page, WHOLE),
        memory(name, nbytes + 2 * PAGE, page, READ_ONLY),
        memory(name, nbytes + PAGE, shared_copies._last_page("cd" * 16, nbytes), READ_ONLY),
        memory(name, nbytes + PAGE, b"\0" * PAGE, READ_ONLY),
        memory("another", nbytes + PAGE, page, READ_ONLY),
        *os.pipe(),
        os.open("/etc/passwd", os.O_RDONLY),
        999_999,
    ]
    this = this_process(right)
    _, started, _ = this
    assert runs(os.getpid(), started)
    found = open_copy(this, key, nbytes)
    assert found is not None
    os.close(found)
    assert all(open_copy(this_process(file), key, nbytes) is None for file in wrong)
    for process in (1 << 40, 0, 2):
        assert open_copy((process, started, right), key, nbytes) is None
    assert not runs(os.getpid(), started + 1), "another process under its number"
    for file in [*made, *wrong[5:8]]:
        with contextlib.suppress(OSError):
            os.close(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes the right to become another user")
def test_another_user_cannot_enter_read_or_prepare_the_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for parent in list(tmp_path.parents)[:3]:
        if parent != Path("/tmp"):
            parent.chmod(0o755)
    folder = tmp_path / "run" / "weights"
    first = Shared(folder)
    parent = os.getpid()

    def other() -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        for enter in (
            lambda: list(folder.iterdir()),
            lambda: os.open(f"/proc/{parent}/fd/{first.arena.file}", os.O_RDONLY),
        ):
            with pytest.raises(PermissionError):
                enter()
        with pytest.raises((ConfigError, NotSharedError)):
            Shared(folder)

    with child(other) as wait:
        wait()
        assert wait() == 0
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match="belongs to user 65534; set XDG_RUNTIME_DIR"):
        Shared(folder)


def test_a_folder_that_others_may_enter_or_that_is_a_link_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "weights"
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o755)
    with pytest.raises(ConfigError, match=r"others may enter .*run; chmod 700"):
        Shared(folder)
    folder.parent.chmod(0o700)
    (tmp_path / "link").symlink_to(folder.parent)
    with pytest.raises(ConfigError, match="is a link"):
        Shared(tmp_path / "link" / "weights")
    (tmp_path / "file").write_text("")
    (tmp_path / "file").chmod(0o600)
    with pytest.raises(ConfigError, match="is not a folder"):
        Shared(tmp_path / "file" / "weights")
    with pytest.raises(NotSharedError, match="cannot be made"):
        Shared(Path("/proc/run/weights"))


def test_a_second_process_waits_and_says_for_whom(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_FIRST_TOLD", 0.0)
    go_on, told = os.pipe()

    def slow() -> Shared:
        put = shared_copies.SharedCopy.put

        def waiting(copy: Any, tensor: torch.Tensor) -> torch.Tensor:
            os.write(told, b"1")
            time.sleep(0.02)
            return put(copy, tensor)

        monkeypatch.setattr(shared_copies.SharedCopy, "put", waiting)
        return Shared(folder)

    with child(slow):
        os.read(go_on, 1)
        second = Shared(folder)
    assert not second.is_new
    assert len(second.said) == 1 and "waiting for process" in second.said[0]


def test_of_several_that_wait_one_speaks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_FIRST_TOLD", 0.0)
    meeting, said = Rendezvous(folder), ([], [], [])

    def wait(heard: list[str]) -> None:
        with meeting.locked("key", heard.append):
            pass

    with meeting.locked("key", said[0].append):
        threads = [threading.Thread(target=wait, args=(heard,)) for heard in said[1:]]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        assert sorted(map(len, said)) == [0, 0, 1]
    for thread in threads:
        thread.join()
    # When both have waited, the next one speaks again.
    with meeting.locked("key", said[0].append):
        thread = threading.Thread(target=wait, args=(said[0],))
        thread.start()
        time.sleep(0.1)
        assert len(said[0]) == 1
    thread.join()


def test_a_lock_that_a_dead_process_left_to_a_child_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_LOST_AFTER", 0.05)
    Shared(folder)
    gc.collect()
    (lock,) = folder.glob("*.lock")
    with lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps([os.getpid(), 1]))
        file.flush()
        with pytest.raises(NotSharedError, match="is gone, and a child of it holds its lock"):
            Shared(folder)
    assert Shared(folder).is_new


def test_weights_that_change_while_they_are_copied_are_not_shared(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is checked when nobody can write to it any more, and only then is it shown to others."""
    tensors = weights()
    put = shared_copies.SharedCopy.put

    def changing(copy: Any, tensor: torch.Tensor) -> torch.Tensor:
        tensors[1][3] += 1
        return put(copy, tensor)

    with monkeypatch.context() as patched:
        patched.setattr(shared_copies.SharedCopy, "put", changing)
        said: list[str] = []
        key = key_of(tensors)
        with shared_copy(
            folder, key, HostMemory.room_for(tensors), lambda placed: key_of(placed) == key, said.append, said.append
        ) as copy:
            for tensor in tensors:
                copy.put(tensor)
    assert len(said) == 1 and "were written to while they were copied" in said[0]
    assert isinstance(copy.arena, FileArena) and not list(folder.glob("*.json"))
    assert Shared(folder).is_new


def test_a_program_that_closes_all_files_goes_on(folder: Path) -> None:
    """Its copy cannot be found or compared any more; another file under that number is neither read nor closed."""
    first = Shared(folder)
    os.close(first.arena.file)
    assert first.arena.differs(first.tensors[:2]) == [True, True]
    reader, writer = os.pipe()
    os.dup2(reader, first.arena.file)
    assert first.arena.differs(first.tensors[:2]) == [True, True]
    number = first.arena.file
    second = Shared(folder)
    assert second.is_new, "nobody else has it"
    assert torch.equal(first.tensors[1], weights()[1])
    del first
    gc.collect()
    os.fstat(number)
    for file in {reader, writer, number}:
        os.close(file)
