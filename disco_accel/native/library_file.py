"""Compiled libraries on disk: whole or not there, one builder at a time, and written by nobody else.

A library lies in a folder of its own, beside a record of its size and hash. It is compiled in a working folder inside
that one and renamed once it is on disk, so another process sees all of it or nothing. A build that is killed leaves
working files, which the next build removes. The record is compared before the loader maps the file: a mapped library
that is too short ends the process with SIGBUS at its first missing page.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from disco_accel.errors import ExtensionError
from disco_accel.graph.files import flush_to_disk

Compile = Callable[[Path], Path]
"""Compiles in an empty folder and returns the library there. Raises ExtensionError."""

Handle = TypeVar("Handle")

_ELSEWHERE = "set TORCH_EXTENSIONS_DIR to a folder of your own"
_WORKING = "building-"
_LOCK = ".building"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_one_thread = threading.RLock()
"""PyTorch's compilation of extensions keeps tables that threads share."""


class Library:
    """The library ``name`` in ``directory``, which ``compile_in`` makes.

    ``require_building`` gets the reason for which it has to be built, and raises ExtensionError where it cannot be.
    """

    def __init__(
        self, directory: Path, name: str, compile_in: Compile, require_building: Callable[[str], None]
    ) -> None:
        self.directory = directory
        self.path = directory / f"{name}.so"
        self.record = directory / f"{name}.sha256"
        self._compile_in = compile_in
        self._require_building = require_building

    def ready(self) -> Path:
        """The path of the whole library, which is built first where it is missing or damaged.

        Raises ExtensionError: it cannot be built, or others than this user can have written it.
        """
        reason = self.fault()
        if reason is not None:
            self._rebuild(reason, lambda: self.fault() is not None)
        return self.path

    def load(self, load: Callable[[str], Handle]) -> Handle:
        """The result of ``load`` for the path; a library that the loader refuses is built anew, once. ``load`` raises
        OSError, as ctypes.CDLL does. Raises ExtensionError as ``ready``; or it cannot be loaded."""
        self.ready()
        tried = self._identity()
        try:
            return load(str(self.path))
        except OSError as error:
            # Not about the file: another one would not be mapped either.
            if "failed to map segment" in str(error.__cause__ or error) or "allocate memory" in str(error):
                raise ExtensionError(
                    f"{self.path} cannot be mapped into this process: {error.__cause__ or error}; raise the limit of "
                    f"memory (ulimit -v), or {_ELSEWHERE}, on a file system that is not mounted noexec"
                ) from error
            reason = f"cannot be loaded ({error.__cause__ or error})"
        self._rebuild(reason, lambda: self._identity() == tried)
        try:
            return load(str(self.path))
        except OSError as error:
            raise ExtensionError(
                f"{self.path} cannot be loaded, although it was built anew: {error.__cause__ or error}"
            ) from error

    def fault(self) -> str | None:
        """Why the library cannot be used as it is; None if it can be loaded.

        Raises ExtensionError: others can have written it.
        """
        if not os.path.lexists(self.path):
            return "is not built"
        require_own(self.directory, stat.S_ISDIR, "folder")
        size, digest = _measure(self.path)
        try:
            recorded = self.record.read_bytes()[:200].decode("ascii", "replace").split()
        except OSError:
            return "has no record of its size and hash beside it"
        if recorded[:1] != [str(size)]:
            return f"is damaged ({size} bytes where {' '.join(recorded[:1]) or 'none'} were written)"
        return None if recorded[1:] == [digest] else "is damaged (another hash than when it was written)"

    def digest(self) -> str:
        """The sha256 of the library as it is on disk, in hex. Raises ExtensionError."""
        return _measure(self.path)[1]

    def _identity(self) -> tuple[int, int, int]:
        status = self.path.stat()
        return status.st_dev, status.st_ino, status.st_mtime_ns

    def _rebuild(self, reason: str, still: Callable[[], bool]) -> None:
        """Build unless another process has done so since; ``still`` says whether the library is the faulty one."""
        self._require_building(f"{self.path} {reason}")
        try:
            _make_folder(self.directory)
            require_own(self.directory, stat.S_ISDIR, "folder")
            with _one_thread, _alone_in(self.directory) as alone:
                if still():
                    self._build(alone)
        except OSError as error:
            raise ExtensionError(
                f"{self.path} {reason} and cannot be built: {error.strerror or error} "
                f"({error.filename or self.directory}); {_ELSEWHERE}, where there is room"
            ) from error

    def _build(self, alone: bool) -> None:
        if alone:
            for leftover in self.directory.glob(f"{_WORKING}*"):
                shutil.rmtree(leftover, ignore_errors=True)
        working = Path(tempfile.mkdtemp(prefix=_WORKING, dir=self.directory))
        try:
            made = self._compile_in(working)
            # Whatever the umask: a library that others can write is not loaded.
            made.chmod(0o755)
            record = working / self.record.name
            record.write_text("{} {}\n".format(*_measure(made)), encoding="ascii")
            record.chmod(0o644)
            for file in (made, record):
                flush_to_disk(file)
            # Between the two they do not fit each other, which is as good as no library.
            made.replace(self.path)
            record.replace(self.record)
            flush_to_disk(self.directory)
        finally:
            shutil.rmtree(working, ignore_errors=True)


def require_own(path: Path, kind: Callable[[int], bool], word: str) -> os.stat_result:
    """The status of ``path``, a ``word`` for which ``kind`` holds and that nobody else can write.

    Its owner is this user, root, or the owner of this package's own code, which could do the same harm there.
    Raises ExtensionError with the remedy.
    """
    status = os.lstat(path)
    if not kind(status.st_mode):
        raise ExtensionError(f"{path} is not a {word}: remove it, or {_ELSEWHERE}")
    if status.st_uid not in (os.geteuid(), 0, os.stat(__file__).st_uid):
        raise ExtensionError(
            f"{path} belongs to user {status.st_uid}, whose code is not run here: remove it, or {_ELSEWHERE}"
        )
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise ExtensionError(
            f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):o}), whose code is not run here: "
            f"remove the {word} and what is in it, or {_ELSEWHERE}"
        )
    return status


def read_own(path: Path, most: int) -> bytes | None:
    """The bytes of a file that nobody but this user can have written, in a folder of which the same holds; None where
    there is none, or it has more than ``most``. Raises ExtensionError as ``require_own``, and OSError."""
    if not os.path.lexists(path):
        return None
    require_own(path.parent, stat.S_ISDIR, "folder")
    require_own(path, stat.S_ISREG, "plain file")
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        data = file.read(most + 1)
        return data if len(data) <= most else None


def _measure(path: Path) -> tuple[int, str]:
    """Size in bytes and sha256 of a file that is this user's own. Raises ExtensionError."""
    require_own(path, stat.S_ISREG, "plain file")
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return os.fstat(file.fileno()).st_size, digest
    except OSError as error:
        raise ExtensionError(f"{path} cannot be read: {error.strerror}; remove it, or {_ELSEWHERE}") from error


def _make_folder(folder: Path) -> None:
    # Each by itself: with parents=True the mode would hold for the last one alone, and a umask of 0 open the others.
    for missing in reversed([f for f in (folder, *folder.parents) if not f.exists()]):
        missing.mkdir(mode=0o755, exist_ok=True)


@contextmanager
def _alone_in(directory: Path) -> Iterator[bool]:
    """One process at a time builds in ``directory``; the lock ends with its process, however that ends.

    False on a file system without locks: then several may build, each in a working folder of its own.
    """
    handle = os.open(directory / _LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            alone = True
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            alone = False
        yield alone
    finally:
        os.close(handle)
