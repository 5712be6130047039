"""Version 2 of the graphs: values that live in spaces, and plans made of buffers (docs/schema.md).

A **space** is memory with a size: a device's arena, the host's, a file. A **value** has bytes and a lifetime; a kernel
that changes one writes its next *version*. A **buffer** is a range of one space that holds one version of one value: a
plan is the graph's vertices with a buffer for each version that they name, copies between buffers, and edges.
"""

from __future__ import annotations

import enum
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from disco_accel.graph.taskgraph import OpCall
from disco_accel.graph.traits import MADE, Traits

Version = tuple[int, int]
"""``(value id, version)``: one content. Version 0 is what the value holds first."""

Edge = tuple[int, int]
"""``(u, v)`` by vertex id: v may start only after u has finished."""

GATE = -(1 << 62)
"""What vertices wait for, in ``after`` and in edges, that start only when the user has brought what arrives there."""


class SpaceKind(enum.StrEnum):
    """What kind of memory a space is. The kinds of its two ends name a copy, and with them the link that it takes."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


class Work(enum.StrEnum):
    """KERNEL: computes in its space. COPY: moves bytes there from the space of what it reads."""

    KERNEL = "kernel"
    COPY = "copy"


@dataclass(frozen=True, slots=True)
class Space:
    """Memory of ``bytes``; None = as much as a plan takes. Offsets of buffers are multiples of ``alignment``.

    ``kernels``: a space of the host in which kernels run, on the machine's processors, beside the one where values have
    their homes. What these kernels use of such values they use there.
    """

    id: int
    kind: SpaceKind
    bytes: int | None = None
    alignment: int = 256
    kernels: bool = False

    @property
    def is_arena(self) -> bool:
        """Whether kernels run there and values have it as their space: a device's memory, or a host device's."""
        return self.kind is SpaceKind.DEVICE or self.kernels


@dataclass(frozen=True, slots=True)
class Value:
    """``bytes`` that vertices read and write in ``space``. ``home``: the space that holds it between steps (STEPS)."""

    id: int
    bytes: int
    space: int
    traits: Traits = MADE
    home: int | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Vertex:
    """A kernel, or a copy from one value to another (a slice where the target is smaller). ``duration`` in seconds.

    ``writes`` of version 0 make the value; version k + 1 changes it in place, and ``reads`` then has version k.
    ``after``: ids of vertices, or GATE, without data. ``may_overwrite``: positions of ``reads`` whose memory the first
    of ``writes`` may take over, at the same offset.
    """

    id: int
    work: Work
    space: int
    op: str = ""
    reads: tuple[Version, ...] = ()
    writes: tuple[Version, ...] = ()
    duration: float | None = None
    after: tuple[int, ...] = ()
    may_overwrite: tuple[int, ...] = ()


@dataclass(frozen=True)
class Graph:
    """One step. ``vertices`` in a topological order, the serial order; ``at_gate``, ``at_end``: versions that the user
    gets, at the gate (before what arrives there) and when the step ends. ``ops``: kernel ids to their calls."""

    name: str
    spaces: tuple[Space, ...]
    values: tuple[Value, ...]
    vertices: tuple[Vertex, ...]
    at_gate: tuple[Version, ...] = ()
    at_end: tuple[Version, ...] = ()
    ops: Mapping[int, OpCall] = field(default_factory=dict)

    @functools.cached_property
    def value(self) -> Mapping[int, Value]:
        """Values by id."""
        return {value.id: value for value in self.values}

    @functools.cached_property
    def space(self) -> Mapping[int, Space]:
        """Spaces by id."""
        return {space.id: space for space in self.spaces}

    def at_home(self, vertex: Vertex, value: Value) -> bool:
        """Whether ``vertex`` uses ``value`` at its home: a kernel on the host one that has its home on the host."""
        on_host = value.home is not None and self.space[value.home].kind is SpaceKind.HOST
        return vertex.work is Work.KERNEL and self.space[vertex.space].kernels and on_host

    @functools.cached_property
    def written_at_home(self) -> frozenset[Version]:
        """The versions that kernels on the host write."""
        return frozenset(v for vertex in self.vertices for v in vertex.writes if self.at_home(vertex, self.value[v[0]]))

    @functools.cached_property
    def gate_outputs(self) -> frozenset[Version]:
        """``at_gate`` as a set."""
        return frozenset(self.at_gate)

    @functools.cached_property
    def end_outputs(self) -> frozenset[Version]:
        """``at_end`` as a set."""
        return frozenset(self.at_end)

    @functools.cached_property
    def writers(self) -> Mapping[Version, Vertex]:
        """The vertex that writes each version; what arrives has none."""
        return {version: vertex for vertex in self.vertices for version in vertex.writes}

    @functools.cached_property
    def readers(self) -> Mapping[Version, Sequence[Vertex]]:
        """The vertices that read each version, in order, each once."""
        readers: dict[Version, list[Vertex]] = defaultdict(list)
        for vertex in self.vertices:
            for version in dict.fromkeys(vertex.reads):
                readers[version].append(vertex)
        return readers

    @functools.cached_property
    def last_version(self) -> Mapping[int, int]:
        """Value id → its last version in the step."""
        last = {value.id: 0 for value in self.values}
        for vertex in self.vertices:
            for value, version in vertex.writes:
                last[value] = max(last[value], version)
        return last


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of one version of a value in ``space``. ``offset`` None: at the value's home, in foreign memory, or of no
    bytes at all: memory that is not the plan's to choose. ``begin``, ``bytes``: which bytes of the value are there
    (``bytes`` None: all from ``begin`` on)."""

    id: int
    version: Version
    space: int
    offset: int | None = None
    begin: int = 0
    bytes: int | None = None

    def range(self, value: Value) -> tuple[int, int]:
        """Which bytes of ``value``, of which it is, are there: from the first up to, not including, the second."""
        return self.begin, value.bytes if self.bytes is None else self.begin + self.bytes


@dataclass(frozen=True, slots=True)
class Planned:
    """The vertex ``id`` of the graph with the buffers that it reads and writes, in the order of its versions.
    Behind them ``reads`` has the further ranges of versions of which a kernel reads several.

    An id that the graph does not have is a copy that the plan adds, of one buffer to another of the same version.
    """

    id: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """``graph`` with a place for everything; ``order`` is topological, a position in it is a priority.

    Buffers that nothing writes are there when the step starts, or arrive at the gate. ``data_edges`` follow from
    buffers, ``memory_edges`` order their reuse. ``cyclic``: run step after step, what is on a device when a step starts
    is there again when it ends. The spaces of ``graph`` say what the plan takes at most.
    """

    graph: Graph
    buffers: tuple[Buffer, ...]
    order: tuple[Planned, ...]
    data_edges: tuple[Edge, ...] = ()
    memory_edges: tuple[Edge, ...] = ()
    cyclic: bool = False


def handed_out_at_gate(graph: Graph, version: Version) -> bool:
    """Whether the user reads ``version`` at the gate, where nothing behind the gate has run."""
    return version in graph.gate_outputs


def overwrites(vertex: Vertex) -> Iterator[tuple[Version, Version]]:
    """The version that is lost and the one that takes its place, for each value that ``vertex`` changes in place."""
    for value, version in vertex.writes:
        if version:
            yield (value, version - 1), (value, version)
