"""The content key of a file, read once and remembered for as long as nobody can have written to it.

A remembered key is used where the file is the same inode with the same size and times, on a file system whose times
show every write. Nobody may have had it open for writing when it was read, nor now: a write in between left another
time. A time must be older than the reading by more than the clocks of file systems are coarse. In every other case all
bytes are read again.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

from disco_accel.native.extension import load_extension
from disco_accel.native.rendezvous import NotSharedError, Rendezvous

_SETLEASE, _SETSIG = 1024, 10
"""Linux, fcntl(2)."""
_TIMES_SHOW_WRITES = frozenset((0xEF53, 0x58465342, 0x9123683E))
"""ext, xfs, btrfs: statfs(2). Not tmpfs, where a write to a mapping may leave the times, nor file systems that other
machines may write to."""
_COARSE = 2.0
"""Seconds."""
_PIECE = 64 << 20
_MOST = 5_000
"""Files that are remembered."""
_LIST = "files"

_Identity = list[int]


def key_of_file(path: Path, meeting: Rendezvous, tell: Callable[[str], None]) -> str:
    """32 hexadecimal digits for the bytes of the file ``path``. Raises NotSharedError: it cannot be read, or changed
    meanwhile."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NotSharedError(f"{path} cannot be read: {error.strerror}") from error
    try:
        before, name = _identity(file), ""
        if _shows_writes(file) and _nobody_writes(file):
            name = f"{before[0]}:{before[1]}"
            entry = _remembered(meeting).get(name)
            # Asked once more: a writer may have come and gone between the two questions.
            if entry is not None and entry[:-1] == before and _identity(file) == before:
                return str(entry[-1])
        began = time.time()
        key = _read(file, before[2])
        if _identity(file) != before:
            raise NotSharedError(f"{path} was written to while it was read")
        if name and _nobody_writes(file) and max(before[3:]) < (began - _COARSE) * 1e9:
            _remember(meeting, name, [*before, key], tell)
        return key
    except OSError as error:
        raise NotSharedError(f"{path} cannot be read: {error.strerror}") from error
    finally:
        os.close(file)


def _identity(file: int) -> _Identity:
    status = os.fstat(file)
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _read(file: int, size: int) -> str:
    load_extension()
    buffer = torch.empty(min(_PIECE, size), dtype=torch.uint8)
    keys, at = [size], 0
    while at < size:
        got = os.preadv(file, [buffer.numpy().data], at)
        if got == 0:
            raise NotSharedError("a file ends before its end")
        keys += torch.ops.disco_accel.content_key([buffer[:got]])
        # Pieces of one length, whatever a read returns.
        if got < len(buffer) and at + got < size:
            raise NotSharedError("a file is read in pieces of other lengths than it was asked for")
        at += got
    halves = torch.ops.disco_accel.content_key([torch.tensor(keys)])
    return "".join(f"{half % (1 << 64):016x}" for half in halves)


def _shows_writes(file: int) -> bool:
    answer = (ctypes.c_long * 64)()
    libc = ctypes.CDLL(None)
    return libc.fstatfs(file, answer) == 0 and answer[0] in _TIMES_SHOW_WRITES


def _nobody_writes(file: int) -> bool:
    """Whether no process has the file open for writing, or mapped so: the kernel then gives a lease for reading."""
    try:
        # Whoever opens it in that instant is not kept waiting, and its signal is one that is ignored.
        fcntl.fcntl(file, _SETSIG, signal.SIGURG)
        fcntl.fcntl(file, _SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(file, _SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True


def _remembered(meeting: Rendezvous) -> dict[str, list[object]]:
    """The entries of the note, all or nothing: a damaged one is forgotten."""
    with contextlib.suppress(ValueError):
        digest, _, text = meeting.note(_LIST).partition(b"\n")
        if digest and digest == _digest(text):
            content: dict[str, list[object]] = json.loads(text)
            return content
    return {}


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).hexdigest().encode()


def _remember(meeting: Rendezvous, name: str, entry: list[object], tell: Callable[[str], None]) -> None:
    with contextlib.suppress(NotSharedError), meeting.locked(_LIST, tell):
        known = _remembered(meeting)
        known.pop(name, None)
        known[name] = entry
        text = json.dumps(dict(list(known.items())[-_MOST:])).encode()
        meeting.set_note(_LIST, _digest(text) + b"\n" + text)
