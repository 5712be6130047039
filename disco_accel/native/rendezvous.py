"""Where processes of one user find the copies that others of them hold: a folder with a list of holders for each key.

The list says which process has which copy open. It is a hint and nothing else: its readers prove the copy by its
content (``shared_copies.py``), so that a wrong list costs a copy and never a byte. The lock of a key is ``flock``'s,
which the kernel gives back when a process dies; a list is replaced whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from disco_accel.errors import ConfigError

_LONGEST = 1 << 20
"""Bytes of a list: some ten thousand holders."""
_VERSION = 1
_FIRST_TOLD, _TOLD_AGAIN = 0.5, 10.0
"""Seconds of waiting after which it is said, and again."""
_LOST_AFTER = 2.0
"""Seconds after which a lock is given up that a dead process holds through a child."""

_ADVICE = "set XDG_RUNTIME_DIR to a folder of your own, or leave share_weights out"


class NotSharedError(Exception):
    """Nothing can be shared here, and nothing was changed; the text says why."""


Holder = tuple[int, int, int]
"""A process that has a copy open: its number, its start in clock ticks since boot, its descriptor of the copy."""


def this_process(descriptor: int) -> Holder:
    """This one as a holder."""
    return os.getpid(), start_of(os.getpid()) or 0, descriptor


def runs(process: int, started: int) -> bool:
    """Whether that very process runs, not another under its number."""
    return started != 0 and start_of(process) == started


def _holds(holder: Holder) -> bool:
    """Whether it runs, and has some file in memory open under that number."""
    process, started, descriptor = holder
    try:
        return runs(process, started) and os.readlink(f"/proc/{process}/fd/{descriptor}").startswith("/memfd:")
    except OSError:
        return False


def start_of(process: int) -> int | None:
    """When ``process`` started, in clock ticks since boot; None if it does not run, or is out of sight."""
    try:
        # The name, in parentheses, may hold anything.
        after_name = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if after_name[0] in "ZX" else int(after_name[19])
    except (OSError, IndexError, ValueError):
        return None


class Rendezvous:
    """The folder ``folder``, which nobody but this user can enter."""

    def __init__(self, folder: Path) -> None:
        """Make it where it is missing.

        Raises:
            ConfigError: it, or the folder around it, is a link, another user's, or open to others.
            NotSharedError: it cannot be made.
        """
        self.folder = folder
        try:
            for one in (folder.parent, folder):
                with contextlib.suppress(FileExistsError):
                    one.mkdir(mode=0o700)
                _require_own(one)
        except OSError as error:
            raise NotSharedError(f"{folder} cannot be made: {error.strerror}") from error
        # Process numbers mean nothing in another namespace.
        self._space = os.stat("/proc/self/ns/pid").st_ino

    def _path(self, key: str, ending: str) -> Path:
        return self.folder / f"{key}-{self._space:x}.{ending}"

    @contextmanager
    def locked(self, key: str, tell: Callable[[str], None]) -> Iterator[None]:
        """Nobody else is inside for ``key``. While another process is, ``tell`` hears of it, in one of those that wait.
        Raises NotSharedError: the folder takes no lock, or a dead process's child holds it."""
        with ExitStack() as closing:
            file = self._lock(key, tell, closing)
        try:
            # For those who wait: a full file system takes their answer, nothing else.
            with contextlib.suppress(OSError):
                _overwrite(file, json.dumps([os.getpid(), start_of(os.getpid())]).encode())
            yield
        finally:
            with contextlib.suppress(OSError):
                _overwrite(file, b"")
                # Explicitly: a child that was forked meanwhile has the file open too.
                fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

    def _lock(self, key: str, tell: Callable[[str], None], closing: ExitStack) -> int:
        path, begin, told = self._path(key, "lock"), time.monotonic(), 0.0
        lost: float | None = None
        speaks = False
        while True:
            try:
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _locked_by(file)
                os.close(file)
            except OSError as error:
                raise NotSharedError(f"{path} cannot be locked: {error.strerror}") from error
            else:
                if _is_still(file, path):
                    return file
                # Whoever held it before has removed it.
                os.close(file)
                continue
            waited = time.monotonic() - begin
            lost = (lost or waited) if holder is not None and not runs(*holder) else None
            if lost is not None and waited - lost > _LOST_AFTER:
                raise NotSharedError(f"process {holder and holder[0]} is gone, and a child of it holds its lock")
            if waited >= _FIRST_TOLD and (told == 0.0 or waited - told >= _TOLD_AGAIN):
                told = waited
                speaks = speaks or self._first_to_speak(key, closing)
                who = "another process" if holder is None else f"process {holder[0]}"
                if speaks:
                    tell(
                        f"share_weights: waiting for {who} to load the frozen weights that are shared ({waited:.0f} s)"
                    )
            time.sleep(min(0.05, 0.002 + waited / 20))

    def _first_to_speak(self, key: str, closing: ExitStack) -> bool:
        """Whether no other process that waits for ``key`` speaks for all; from now on this one does, to ``closing``."""
        try:
            file = os.open(
                self._path(key, "waiting"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600
            )
        except OSError:
            return True
        closing.callback(os.close, file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def holders(self, key: str) -> Sequence[Holder]:
        """Those of the list that may have a copy open. To be called under the lock. Raises ValueError: the list is
        damaged."""
        text = self.note(key)
        if not text:
            return []
        try:
            content = json.loads(text)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        if not isinstance(content, dict) or content.get("version") != _VERSION or content.get("key") != key:
            raise ValueError("not a list of this key")
        listed = content.get("holders")
        if not isinstance(listed, list) or not all(_is_holder(one) for one in listed):
            raise ValueError("no list of holders")
        return [(one[0], one[1], one[2]) for one in listed if _holds(one)]

    def write(self, key: str, holders: Sequence[Holder]) -> None:
        """Replace the list, whole or not at all. To be called under the lock. Raises NotSharedError: the folder cannot
        be written to."""
        self.set_note(key, json.dumps({"version": _VERSION, "key": key, "holders": holders}).encode())

    def note(self, key: str) -> bytes:
        """The note of ``set_note``; nothing if there is none. Raises ValueError if it is no small file."""
        return _read(self._path(key, "json"))

    def set_note(self, key: str, text: bytes) -> None:
        """Replace the note under ``key``, whole or not at all. To be called under the lock. Raises NotSharedError: the
        folder cannot be written to."""
        fresh = self._path(key, "new")
        try:
            # What a killed process has left is written over: the lock is ours.
            file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(file, "wb") as stream:
                stream.write(text)
            fresh.rename(self._path(key, "json"))
        except OSError as error:
            raise NotSharedError(f"{fresh} cannot be written: {error.strerror}") from error

    def sweep(self) -> None:
        """Remove the files of keys whose holders are all gone, unless somebody is at them."""
        for path in self.folder.glob(f"*-{self._space:x}.lock"):
            key = path.name.rpartition("-")[0]
            with contextlib.suppress(OSError):
                file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if _is_still(file, path) and not self._held(key):
                        # The lock last: whoever waits for it finds it removed and makes another.
                        for ending in ("new", "json", "waiting", "lock"):
                            self._path(key, ending).unlink(missing_ok=True)
                finally:
                    os.close(file)

    def _held(self, key: str) -> bool:
        try:
            return bool(self.holders(key))
        except ValueError:
            # The next that asks for the key says so.
            return True


def _require_own(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"share_weights: {folder} is not a folder, or is a link; remove it, or {_ADVICE}")
    if status.st_uid != os.geteuid():
        raise ConfigError(f"share_weights: {folder} belongs to user {status.st_uid}; {_ADVICE}")
    if status.st_mode & 0o077:
        raise ConfigError(f"share_weights: others may enter {folder}; chmod 700 {folder}, or {_ADVICE}")


def _is_holder(entry: object) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 3
        and all(type(number) is int and 0 <= number < 1 << 62 for number in entry)
    )


def _is_still(file: int, path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    mine = os.fstat(file)
    return (status.st_dev, status.st_ino) == (mine.st_dev, mine.st_ino)


def _locked_by(file: int) -> tuple[int, int] | None:
    """The process that has written into its lock, and its start."""
    try:
        process, started = json.loads(os.pread(file, 200, 0))
    except (OSError, ValueError, TypeError):
        return None
    return (process, started) if _is_holder([process, started, 0]) else None


def _overwrite(file: int, text: bytes) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, text, 0)


def _read(path: Path) -> bytes:
    """The content of a small file of this user's; nothing if it is not there. Raises ValueError for another kind."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise ValueError(error.strerror) from error
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError("not a file")
        text = os.read(file, _LONGEST + 1)
    finally:
        os.close(file)
    if len(text) > _LONGEST:
        raise ValueError("too long")
    return text
