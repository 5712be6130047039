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
from disco_accel.graph.convert import plan_in_buffers, plan_in_vertices
from disco_accel.graph.convert_graphs import graph_in_values, graph_in_vertices
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.schema1_files import (
    IdNames,
    memgraph_from_version_1,
    memgraph_to_json,
    sayable,
    taskgraph_from_version_1,
    taskgraph_to_json,
)
from disco_accel.graph.schema2_files import graph_from_json, graph_to_json, lines, plan_from_json, plan_to_json
from disco_accel.graph.strict_json import an_object, plain, shown
from disco_accel.graph.strict_json import parse_json as parse_json
from disco_accel.graph.taskgraph import TaskGraph

MAX_FILE_BYTES = 1 << 30
"""A larger file is refused before it is read."""

VERSIONS = (1, 2)
_HASHED = re.compile(r"\b1[0-9]{18}\b")


def read_taskgraph(path: str | os.PathLike[str], names: IdNames | None = None) -> TaskGraph:
    """Read a TASKGRAPH file. ``names``, if given, is filled with the ids that are strings.

    Vertices come back in a topological order (the file's own where it is one). Raises GraphFileError, which names the
    file, the vertex and the key.
    """
    return read_taskgraph_version(path, names)[0]


def read_taskgraph_version(path: str | os.PathLike[str], names: IdNames | None = None) -> tuple[TaskGraph, int]:
    """As ``read_taskgraph``, with the version of the file."""
    with _naming(path):
        data = _load(path)
        graph = taskgraph_from_json(data, names)
        return graph, an_object(data, "the file")["version"]


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


def write_taskgraph(
    graph: TaskGraph, path: str | os.PathLike[str], names: Mapping[int, str] | None = None, version: int = 1
) -> None:
    """Write ``graph`` atomically; equal graphs give equal bytes. ``ops`` have no place in the file.

    Raises GraphFileError for what ``version`` cannot say; ids of version 2 are numbers, whatever ``names`` are.
    """
    data = lines(taskgraph_to_json(graph, names)) if version == 1 else lines(graph_to_json(graph_in_values(graph)))
    write_atomically(path, data)


def write_memgraph(
    graph: MemGraph, path: str | os.PathLike[str], names: Mapping[int, str] | None = None, version: int = 1
) -> None:
    """As ``write_taskgraph``, for a plan."""
    data = lines(memgraph_to_json(graph, names)) if version == 1 else lines(plan_to_json(plan_in_buffers(graph)))
    write_atomically(path, data)


def fingerprint(graph: TaskGraph) -> str:
    """Return the sha256, in hex, of all that a plan depends on: the graph without its name and ops."""
    data = graph_as_json(graph)
    data.pop("name")
    return hashlib.sha256(lines(data)).hexdigest()


def graph_as_json(graph: TaskGraph) -> dict[str, Any]:
    """Return ``graph``, without its ops, as the object that a file of the first version with words for it holds."""
    if version_needed(graph) == 1 and graph.host_memory is None:
        return taskgraph_to_json(graph)
    return graph_to_json(graph_in_values(graph))


def version_needed(graph: TaskGraph | MemGraph) -> int:
    """The first version of the files that has words for devices and vertices: 1 but for kernels on a host device, for
    values that change over steps or that the host renews between them, and for kernels that change another output in
    place than the first."""
    on_host = any(device.host for device in graph.devices)
    return 1 if not on_host and all(sayable(vertex) for vertex in graph.vertices) else 2


def plan_as_json(plan: MemGraph) -> dict[str, Any]:
    """Return ``plan`` as the object that a file of the first version with words for it holds."""
    return memgraph_to_json(plan) if version_needed(plan) == 1 else plan_to_json(plan_in_buffers(plan))


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


def taskgraph_from_json(data: object, names: IdNames | None = None) -> TaskGraph:
    """Build the TaskGraph that ``data`` (parsed JSON) describes. Raises GraphFileError."""
    top = _header(data, "taskgraph")
    if top["version"] == 2:
        return graph_in_vertices(graph_from_json(top))
    return taskgraph_from_version_1(top, names)


def memgraph_from_json(data: object, names: IdNames | None = None) -> MemGraph:
    """Build the MemGraph that ``data`` (parsed JSON) describes; references must exist. Raises GraphFileError."""
    top = _header(data, "memgraph")
    if top["version"] == 2:
        return plan_in_vertices(plan_from_json(top))
    return memgraph_from_version_1(top, names)


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
    if version not in VERSIONS or isinstance(version, bool | float):
        raise GraphFileError(f"version: expected 1 or 2, got {shown(version)}")
    return top


def in_file(message: str, names: Mapping[int, str]) -> str:
    """Return ``message``, printable, with the ids that stand for texts written as the file writes them."""
    message = message.encode("utf-8", "backslashreplace").decode()
    return _HASHED.sub(lambda match: plain(names.get(int(match[0]), match[0])), message)
