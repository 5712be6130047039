"""TaskGraph and MemGraph as JSON files (docs/schema.md): strict reading, deterministic bytes, atomic writing."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from disco_accel.errors import GraphFileError
from disco_accel.graph.graph_json import (
    VERSION,
    IdNames,
    lines,
    memgraph_from_object,
    memgraph_to_object,
    taskgraph_from_object,
    taskgraph_to_object,
)
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.strict_json import an_object, parse_json, plain, shown
from disco_accel.graph.taskgraph import TaskGraph

MAX_FILE_BYTES = 1 << 30
"""A larger file is refused before it is read."""

_HASHED = re.compile(r"\b1[0-9]{18}\b")


def read_taskgraph(path: str | os.PathLike[str], names: IdNames | None = None) -> TaskGraph:
    """Read a TASKGRAPH file. ``names``, if given, is filled with the ids that are strings. Vertices come back in a
    topological order (the file's own where it is one). Raises GraphFileError, which names the file, the vertex and the
    key."""
    with _naming(path):
        return taskgraph_from_json(_load(path), names)


def read_either(path: str | os.PathLike[str], names: IdNames | None = None) -> tuple[TaskGraph | MemGraph, int]:
    """Read a file of either format, with its version. Raises GraphFileError."""
    with _naming(path):
        data = _load(path)
        top = an_object(data, "the file")
        plan = top.get("format") == "memgraph"
        graph = memgraph_from_json(data, names) if plan else taskgraph_from_json(data, names)
        return graph, top["version"]


def read_memgraph(path: str | os.PathLike[str], names: IdNames | None = None) -> MemGraph:
    """Read a MEMGRAPH file; whether it is a valid plan is for ``verify`` to say. Raises GraphFileError."""
    with _naming(path):
        return memgraph_from_json(_load(path), names)


def write_taskgraph(graph: TaskGraph, path: str | os.PathLike[str], names: Mapping[int, str] | None = None) -> None:
    """Write ``graph`` atomically; equal graphs give equal bytes. ``ops`` have no place in the file."""
    write_atomically(path, lines(taskgraph_to_object(graph, names)))


def write_memgraph(graph: MemGraph, path: str | os.PathLike[str], names: Mapping[int, str] | None = None) -> None:
    """As ``write_taskgraph``, for a plan."""
    write_atomically(path, lines(memgraph_to_object(graph, names)))


def fingerprint(graph: TaskGraph) -> str:
    """Return the sha256, in hex, of all that a plan depends on: the graph without its name and ops."""
    return hashlib.sha256(lines({**taskgraph_to_object(graph), "name": ""})).hexdigest()


def write_atomically(path: str | os.PathLike[str], data: bytes, mode: int = 0o644) -> None:
    """Write ``data`` to ``path`` so that a reader sees the old file or the whole new one, also after a crash."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def flush_to_disk(path: str | os.PathLike[str]) -> None:
    """Return once the file or folder ``path`` is as it is now after a crash, too."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def taskgraph_from_json(data: object, names: IdNames | None = None) -> TaskGraph:
    """Build the TaskGraph that ``data`` (parsed JSON) describes. Raises GraphFileError."""
    return taskgraph_from_object(_header(data, "taskgraph"), names)


def memgraph_from_json(data: object, names: IdNames | None = None) -> MemGraph:
    """Build the MemGraph that ``data`` (parsed JSON) describes; references must exist. Raises GraphFileError."""
    return memgraph_from_object(_header(data, "memgraph"), names)


@contextlib.contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except GraphFileError as error:
        raise GraphFileError(f"{os.fspath(path)}: {error}") from None


def _load(path: str | os.PathLike[str]) -> object:
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            data = stream.read(MAX_FILE_BYTES + 1) if size <= MAX_FILE_BYTES else b""
    except OSError as error:
        raise GraphFileError(f"cannot be read: {error.strerror}") from None
    if max(size, len(data)) > MAX_FILE_BYTES:
        raise GraphFileError(f"larger than the {MAX_FILE_BYTES} bytes that a graph file may have")
    return parse_json(data)


def _header(data: object, kind: str) -> dict[str, Any]:
    top = an_object(data, "the file")
    if top.get("format") != kind:
        raise GraphFileError(f"format: expected {kind!r}, got {shown(top.get('format'))}")
    version = top.get("version")
    if version not in (1, VERSION) or isinstance(version, bool | float):
        raise GraphFileError(f"version: expected 1 or {VERSION}, got {shown(version)}")
    return top


def in_file(message: str, names: Mapping[int, str]) -> str:
    """Return ``message``, printable, with the ids that stand for texts written as the file writes them."""
    message = message.encode("utf-8", "backslashreplace").decode()
    return _HASHED.sub(lambda match: plain(names.get(int(match[0]), match[0])), message)
