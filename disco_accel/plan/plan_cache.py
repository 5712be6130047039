"""Plans on disk, so that a second run of the same training plans nothing.

One file per fingerprint, which covers everything a plan is made from except measured durations: these differ from run
to run, and a plan of the same graph is correct with any of them. Each file is a MEMGRAPH with one more key. No file is
trusted: it is read strictly, every vertex of the task graph is taken from the caller's graph, and the static judge must
accept the result. A file with a fault is ignored, and one line of the log names the fault.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from disco_accel.errors import GraphFileError, VerifyError
from disco_accel.graph.copies import is_resident_range, swaps_out
from disco_accel.graph.files import fingerprint, memgraph_from_json, parse_json
from disco_accel.graph.graph_json import memgraph_to_object
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph, Vertex
from disco_accel.graph.value_numbering import graph_of_plan
from disco_accel.plan.cache_folder import ForeignFolder, Unusable, own_folder, read_private, remove_oldest, write_file
from disco_accel.simulate.simulator import Machine
from disco_accel.sizes import format_size
from disco_accel.verify.static import verify

logger = logging.getLogger("disco_accel")

MAX_FILE_BYTES = 1 << 28
"""A plan of a million vertices takes about this much; a larger file is refused before it is read."""

MOST_FILES = 256
"""The oldest plans beyond this many are removed when a new one is stored."""

_KEY = "plan_cache"
_SOURCES = ("graph", "plan", "simulate", "verify", "runtime_ext/plan")
_said: set[str] = set()


class PlanCacheUse(enum.StrEnum):
    """Where a plan comes from, as ``stats(model)`` says it."""

    HIT = "hit"
    """Read from the cache of plans."""
    MISS = "miss"
    """Made, and stored there."""
    OFF = "off"
    """Made; there is no cache."""


def plan_fingerprint(
    graph: TaskGraph,
    *,
    planner: str,
    policy: str,
    cyclic: bool,
    machine: Machine | None,
    environment: Mapping[str, str],
    plan_seconds: float | None = None,
) -> str:
    """The sha256, in hex, of everything that the plan of ``graph`` depends on except durations.

    ``graph`` has the memory and the alignment that the plan gets. ``environment``: other facts that must be equal, such
    as PyTorch's version and the device's name. ``plan_seconds``: the user's deadline; a plan that it cut short is used
    again only with the same deadline. This package's version and the sources of its planners are added.
    """
    bare = replace(graph, vertices=tuple(replace(vertex, duration=None) for vertex in graph.vertices))
    calls = hashlib.sha256()
    for vertex, call in sorted(graph.ops.items()):
        calls.update(f"{vertex} {call!r}\n".encode())
    parts = {
        "graph": fingerprint(bare),
        "calls": calls.hexdigest(),
        "planner": planner,
        "policy": policy,
        "plan_seconds": plan_seconds,
        "cyclic": cyclic,
        "machine": repr(machine or Machine()),
        "sources": _sources(),
        "environment": dict(sorted(environment.items())),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@functools.cache
def _sources() -> str:
    """A hash of the planners' sources: after a change to them all plans are made anew, also within one version."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for part in _SOURCES:
        for path in sorted(p for p in (package / part).rglob("*") if p.suffix in (".py", ".cpp", ".h")):
            digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


class PlanCache:
    """Plans in ``folder``/plans, for this user alone. That is a folder of the cache's own: see ``cache_folder``."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder) / "plans"

    def load(self, key: str, graph: TaskGraph, *, cyclic: bool) -> MemGraph | None:
        """The verified plan of ``graph``, or of that without some of its clones, that is stored under ``key``.

        None if there is none that can be used.
        """
        path = self._path(key)
        try:
            data = read_private(path, MAX_FILE_BYTES)
            if data is None:
                return None
            return _usable(parse_json(data), key, graph, cyclic)
        except OSError as error:
            _say(path, f"cannot be read: {error.strerror or error}")
        except (GraphFileError, VerifyError, Unusable) as error:
            _say(path, str(error))
        return None

    def store(self, key: str, plan: MemGraph) -> None:
        """Keep ``plan`` under ``key``; where that fails, the next run plans again and this one goes on."""
        path = self._path(key)
        top = {_KEY: {"fingerprint": key}, **memgraph_to_object(plan)}
        data = json.dumps(top, separators=(",", ":")).encode() + b"\n"
        try:
            with own_folder(self.folder) as handle:
                write_file(handle, path.name, data)
                remove_oldest(handle, MOST_FILES)
        except OSError as error:
            _say(path, f"cannot be written: {error.strerror or error}")
        except ForeignFolder as error:
            _say(self.folder, str(error))

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def _say(path: Path, reason: str) -> None:
    line = f"plan cache: {path}: {reason.splitlines()[0]}; ignored"
    if line not in _said:
        _said.add(line)
        logger.warning("%s", line)


def _usable(data: object, key: str, graph: TaskGraph, cyclic: bool) -> MemGraph:
    """The plan in ``data`` for ``graph``, verified. Raises GraphFileError, VerifyError, Unusable."""
    mark = data.get(_KEY) if isinstance(data, dict) else None
    if not isinstance(mark, dict) or mark.get("fingerprint") != key:
        raise Unusable("made for something else")
    plan = memgraph_from_json(data)
    if plan.devices != graph.devices or plan.cyclic != cyclic:
        raise Unusable("made for other devices")
    swapped = [sum(v.sizes) + plan.host.alignment for v in plan.vertices if swaps_out(v)]
    if plan.host.memory > sum(swapped):
        raise Unusable(f"asks for {format_size(plan.host.memory)} of host memory without need")
    # Where there is no such graph, the judge names a vertex that is missing.
    graph = graph_of_plan(graph, plan.vertices) or graph
    plan = with_own_vertices(plan, graph)
    verify(graph, plan)
    return plan


def with_own_vertices(plan: MemGraph, graph: TaskGraph) -> MemGraph:
    """Return ``plan``, which comes from a file, with the name and every vertex of ``graph`` taken from there."""
    own = {vertex.id: vertex for vertex in graph.vertices}
    return replace(plan, name=graph.name, vertices=tuple(_rebuilt(vertex, own) for vertex in plan.vertices))


def _rebuilt(vertex: Vertex, own: Mapping[int, Vertex]) -> Vertex:
    """Return ``vertex`` with every field but its inputs from the graph, or as a plain copy, of a range or of all bytes,
    if the plan has added it."""
    if vertex.id in own:
        return replace(own[vertex.id], inputs=vertex.inputs)
    fields = ("id", "kind", "space", "op", "inputs", "sizes", "begin", "source")
    plain = Vertex(**{field: getattr(vertex, field) for field in fields})
    source = own.get(vertex.inputs[0][0]) if is_resident_range(vertex) else None
    return plain if source is None else replace(plain, traits=source.traits)
