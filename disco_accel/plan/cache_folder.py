"""A folder of the plan cache's: made or taken over, marked as the cache's, and the only place where files are removed.

Everything goes through a handle of the folder, so that a folder put in its place meanwhile changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from disco_accel.graph.strict_json import plain
from disco_accel.sizes import format_size

MARKER = ".disco_accel-plans"
_NOTE = b"Plans and checks of disco_accel. It adds to them and removes the oldest; it touches no other files.\n"
_PLAN = re.compile(r"[0-9a-f]{64}\.json")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\.json\.[0-9a-z_]{8,16}")
_STALE_SECONDS = 3600
"""No writer takes so long: a temporary file of this age was left by one that was killed."""


class ForeignFolder(Exception):
    """Why a folder is left alone."""


class Unusable(Exception):
    """Why a file is left alone."""


@contextlib.contextmanager
def own_folder(path: Path) -> Iterator[int]:
    """A handle of the folder ``path``, which is made if there is none.

    A folder without the marker is used, and marked, if all its files have names that the cache gives: older versions
    set no marker, nor did a process that was killed too early. Raises ForeignFolder for any other, and OSError.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise ForeignFolder("is not a folder of this user's own") from None
        raise
    try:
        status = os.fstat(handle)
        if status.st_uid != os.getuid():
            raise ForeignFolder("is not a folder of this user's own")
        if status.st_mode & 0o022:
            raise ForeignFolder("others than this user can write into it; take that away with chmod go-w")
        _mark(handle)
        yield handle
    finally:
        os.close(handle)


def _mark(handle: int) -> None:
    """Set the marker unless it is there. Raises ForeignFolder where somebody else's files lie."""
    try:
        status = os.stat(MARKER, dir_fd=handle, follow_symlinks=False)
    except FileNotFoundError:
        _refuse_others(handle)
        # A process that does the same at this moment sets the same marker.
        with contextlib.suppress(FileExistsError):
            _write_new(handle, MARKER, _NOTE)
        return
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
        raise ForeignFolder(f"its {MARKER} is not a file of this user's own")


def _refuse_others(handle: int) -> None:
    for name in os.listdir(handle):
        if name != MARKER and not _PLAN.fullmatch(name) and not _TEMPORARY.fullmatch(name):
            raise ForeignFolder(
                f"holds '{plain(name)}' and no {MARKER}, so it is not the plan cache's; set plan_cache to another"
            )


def write_file(handle: int, name: str, data: bytes) -> None:
    """Write the file ``name`` so that a reader sees the old one or the whole new one, also after a crash."""
    temporary = f".{name}.{secrets.token_hex(8)}"
    try:
        _write_new(handle, temporary, data)
        os.replace(temporary, name, src_dir_fd=handle, dst_dir_fd=handle)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=handle)
        raise


def read_private(path: Path, most: int) -> bytes | None:
    """The bytes of a file that only this user can have written; None if there is no such file.

    Raises Unusable, and OSError."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with os.fdopen(handle, "rb") as stream:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise Unusable("not a plain file")
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
            raise Unusable("others than this user can have written it")
        if status.st_size > most:
            raise Unusable(f"larger than the {format_size(most)} that such a file may have")
        return stream.read(most)


def _write_new(handle: int, name: str, data: bytes) -> None:
    """Write a new file, which only this user can read under any umask."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, 0o600, dir_fd=handle), "wb") as stream:
        os.fchmod(stream.fileno(), 0o600)
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def remove_oldest(handle: int, most: int) -> None:
    """Remove the oldest plans beyond ``most``, and files that killed writers have left; nothing else."""
    plans: list[tuple[float, str]] = []
    stale = []
    for entry in os.scandir(handle):
        # Another process may have removed it by now.
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                continue
            if _PLAN.fullmatch(entry.name):
                plans.append((status.st_mtime, entry.name))
            elif _TEMPORARY.fullmatch(entry.name) and status.st_mtime < time.time() - _STALE_SECONDS:
                stale.append(entry.name)
    for name in (*stale, *(name for _, name in sorted(plans)[: max(0, len(plans) - most)])):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=handle)
