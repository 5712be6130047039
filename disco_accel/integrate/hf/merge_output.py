"""The folder of a merged model: written beside its place shard by shard, renamed when whole, taken up after a kill.

``.NAME.merging`` beside the folder NAME holds ``model`` with its files, the key of the inputs, and for each shard that
is whole a record with the digests of its tensors.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch

from disco_accel.errors import ConfigError, DiscoError, ExecutionError
from disco_accel.graph.files import flush_to_disk, write_atomically
from disco_accel.integrate.hf.merge_plan import _MergedFile
from disco_accel.integrate.hf.safetensors_file import opened
from disco_accel.sizes import format_size

_PIECE = 4 << 20
_LENGTH = 8
"""Bytes of the length of a safetensors header."""
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_AGAIN = "run the same command again, which keeps the shards that are whole"


class _MergeFolder:
    """The unfinished folder of one merge, which this process alone writes."""

    def __init__(self, target: Path, staging: Path, key: str) -> None:
        self.target = target
        self._staging = staging
        self._key = key
        self.model = staging / "model"
        self._records = staging / "whole"

    @property
    def is_published(self) -> bool:
        """Whether a process that was killed since has renamed it already."""
        return not self.model.exists() and self._is_ours() and _filled(self.target)

    def _is_ours(self) -> bool:
        with contextlib.suppress(OSError):
            return (self._staging / "inputs").read_text(encoding="utf-8") == self._key
        return False

    def begin(self) -> None:
        """Keep the shards of a merge of the same inputs, remove those of others. Raises ConfigError: the target holds
        files."""
        if _filled(self.target):
            raise _taken(self.target)
        if not self._is_ours():
            for folder in (self.model, self._records):
                shutil.rmtree(folder, ignore_errors=True)
            _replace(self._staging / "inputs", self._key)
        self.model.mkdir(exist_ok=True)
        self._records.mkdir(exist_ok=True)

    def is_whole(self, file: _MergedFile, header: bytes) -> bool | None:
        """Whether the shard is there with the bytes that were written; None: no record says that it ever was."""
        try:
            record = json.loads((self._records / f"{file.name}.json").read_text(encoding="utf-8"))
            with opened(self.model / file.name) as descriptor:
                found = digests(descriptor, file, header)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, ConfigError):
            return False
        return bool(record == found)

    def require_space(self, sizes: Mapping[str, int]) -> None:
        """Check that the disk has room for files of these ``sizes``, less those of them that are there. Raises
        ExecutionError."""
        there = {path.name: path.stat().st_blocks * 512 for path in self.model.iterdir()}
        needed = sum(max(0, size - there.get(name, 0)) for name, size in sizes.items())
        free = shutil.disk_usage(self.model).free
        if needed > free:
            raise ExecutionError(
                f"{self.target}: the merged model takes {format_size(needed)} more, its disk has {format_size(free)}; "
                f"make room there, and {_AGAIN}"
            )

    @property
    def is_started(self) -> bool:
        """Whether a shard is whole, which the next run would keep."""
        return self._records.is_dir() and any(self._records.iterdir())

    def keep(self, file: _MergedFile, written: dict[str, str]) -> None:
        """Record that a shard is whole and on disk."""
        _replace(self._records / f"{file.name}.json", json.dumps(written))

    def publish(self) -> None:
        """Give the folder its name, once all of its files are on disk. Raises ConfigError."""
        for path in (*self.model.iterdir(), self.model):
            flush_to_disk(path)
        try:
            self.model.rename(self.target)
        except OSError as error:
            raise ConfigError(
                f"-o: {self.target} cannot be put in place ({error.strerror}); {self.model} has the whole merged model"
            ) from error
        flush_to_disk(self.target.parent)

    def remove(self) -> None:
        """Remove everything beside the target."""
        shutil.rmtree(self._staging, ignore_errors=True)


@contextmanager
def merge_folder(target: Path, key: str) -> Iterator[_MergeFolder]:
    """The folder in which a merge of inputs with that ``key`` is written, locked against other processes.

    Raises:
        ConfigError: another merge writes it, or it cannot be made.
        ExecutionError: the disk is full.
    """
    target = target.absolute()
    staging = target.with_name(f".{target.name}.merging")
    if _filled(target) and not staging.exists():
        raise _taken(target)
    with _disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(staging, target):
            folder = _MergeFolder(target, staging, key)
            try:
                yield folder
            except DiscoError:
                if not folder.is_started:
                    folder.remove()
                raise


def _taken(target: Path) -> ConfigError:
    return ConfigError(f"-o: {target} exists and is not an empty folder; name another one, or remove it")


@contextmanager
def _locked(staging: Path, target: Path) -> Iterator[None]:
    path = staging / "lock"
    while True:
        staging.mkdir(exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            continue  # another merge has just ended and removed it
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(f"-o: another merge writes {target}; wait for it, or name another folder") from None
        if path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino:
            break
        os.close(descriptor)
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or target
        if error.errno in _OF_THE_DISK:
            raise ExecutionError(f"{where}: {error.strerror}; make room there, and {_AGAIN}") from error
        raise ConfigError(f"-o: {where} cannot be written: {error.strerror}; name another folder") from error


class _ShardWriter:
    """One shard while it is written, tensors in any order."""

    def __init__(self, path: Path, file: _MergedFile, header: bytes) -> None:
        """Make the file, with all of its space, where the file system can reserve some. Raises OSError."""
        self._path = path
        self._places = places(file, header)
        self.written: dict[str, str] = {"": _digest(header)}
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            self._reserve(size_of(file, header))
            self._write(memoryview(header), 0)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _reserve(self, size: int) -> None:
        try:
            os.posix_fallocate(self._descriptor, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise OSError(error.errno, error.strerror, str(self._path)) from error

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor, contiguous."""
        values = tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
        self._write(values, self._places[name])
        self.written[name] = _digest(values)

    def put_pieces(self, name: str, pieces: Iterator[torch.Tensor]) -> None:
        """Write a tensor whose bytes come in pieces."""
        digest, offset = hashlib.blake2b(digest_size=16), self._places[name]
        for piece in pieces:
            values = piece.numpy().data
            self._write(values, offset)
            digest.update(values)
            offset += len(values)
        self.written[name] = digest.hexdigest()

    def _write(self, values: memoryview, offset: int) -> None:
        done = 0
        while done < len(values):
            try:
                done += os.pwrite(self._descriptor, values[done:], offset + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self, *, whole: bool) -> None:
        """Close the file; where it is ``whole``, once it is on disk."""
        try:
            if whole:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


def header_of(file: _MergedFile) -> bytes:
    """The first bytes of the file as safetensors writes them, the length of the header among them.

    The order of tensors is safetensors' own, told by a file of empty ones.
    """
    empty = {name: torch.empty(0, dtype=view.dtype) for name, view in file.tensors.items()}
    saved = safetensors.torch.save(empty, dict(file.metadata))
    entries = json.loads(saved[_LENGTH : _LENGTH + int.from_bytes(saved[:_LENGTH], "little")])
    offset = 0
    for name, entry in entries.items():
        if name != "__metadata__":
            view = file.tensors[name]
            entry |= {"shape": list(view.size), "data_offsets": [offset, offset + view.nbytes]}
            offset += view.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _LENGTH)
    return len(text).to_bytes(_LENGTH, "little") + text


def size_of(file: _MergedFile, header: bytes) -> int:
    """Bytes of the whole file."""
    return len(header) + sum(view.nbytes for view in file.tensors.values())


def places(file: _MergedFile, header: bytes) -> dict[str, int]:
    """Name of a tensor → its offset from the start of the file."""
    entries = json.loads(header[_LENGTH:])
    return {name: len(header) + entries[name]["data_offsets"][0] for name in file.tensors}


def digests(descriptor: int, file: _MergedFile, header: bytes) -> dict[str, str]:
    """What ``_ShardWriter.written`` was when it wrote these bytes."""
    if os.fstat(descriptor).st_size != size_of(file, header):
        return {}
    found = {"": _digest(os.pread(descriptor, len(header), 0))}
    for name, begin in places(file, header).items():
        digest, end = hashlib.blake2b(digest_size=16), begin + file.tensors[name].nbytes
        for offset in range(begin, end, _PIECE):
            digest.update(os.pread(descriptor, min(_PIECE, end - offset), offset))
        found[name] = digest.hexdigest()
    return found


def _digest(values: bytes | memoryview) -> str:
    return hashlib.blake2b(values, digest_size=16).hexdigest()


def _filled(folder: Path) -> bool:
    return folder.is_symlink() or folder.is_file() or (folder.is_dir() and any(folder.iterdir()))


def _replace(path: Path, text: str) -> None:
    write_atomically(path, text.encode())
    flush_to_disk(path.parent)
