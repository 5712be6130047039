"""Random plans of graphs whose values change over steps, by drawing lots: no planner, and nothing that one would avoid.

Vertices run in serial order. Between them values leave the device and come back at random, to where there is room;
edges are those that the reuse of memory needs, and no more.
"""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from disco_accel.errors import PlanError
from disco_accel.graph.check import after_gate
from disco_accel.graph.copies import swaps, swaps_in, swaps_out
from disco_accel.graph.home_uses import HomeUses
from disco_accel.graph.memgraph import Edge, MemGraph, Slot
from disco_accel.graph.order import data_edges, serial_order
from disco_accel.graph.spaces import HOST, Space, SpaceKind
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import (
    arrives_at_gate,
    handed_out_at_gate,
    host_copy_exists,
    is_foreign,
    lasting_versions,
    must_survive_step,
    outlives_step,
    overwrites,
)
from disco_accel.plan import make_plan
from disco_accel.verify.occupants import Occupants
from tests.support.graphs.strategies import Shape, random_taskgraph, with_working_sets

STATE_SHAPES = (
    Shape(vertices=10, states=0.5, devices=1, old_versions=True),
    Shape(vertices=12, states=0.4, gate=False, keep=0.3, old_versions=True),
    Shape(vertices=8, inputs=3, states=0.8, inplace=0.3, may_inplace=0.4, old_versions=True),
)
"""Graphs with values that change over steps: few vertices and many changes, with and without a gate."""

TIMED_SHAPES = tuple(replace(shape, inplace=0.0, old_versions=False) for shape in STATE_SHAPES)
"""The same as far as the timed planner takes them: what was overwritten is not read later."""

_UNIT = 256


class NoPlan(Exception):
    """These lots led to no plan."""


def state_plans(count: int, first_seed: int = 0) -> list[tuple[TaskGraph, MemGraph]]:
    """Return ``count`` graphs that change a value over steps, each with a plan and the memory that it takes."""
    found: list[tuple[TaskGraph, MemGraph]] = []
    seed = first_seed
    while len(found) < count:
        seed += 1
        rng = random.Random(seed)
        graph = random_taskgraph(rng, rng.choice(STATE_SHAPES))
        if any(len(versions) > 1 for versions in lasting_versions(graph.vertices).values()):
            try:
                plan = random_plan(graph, rng)
            except NoPlan:
                continue
            found.append((replace(graph, spaces=plan.devices), plan))
    return found


def timed_state_plans(count: int, first_seed: int = 0) -> list[tuple[TaskGraph, MemGraph]]:
    """The same by the timed planner, in little memory."""
    found: list[tuple[TaskGraph, MemGraph]] = []
    seed = first_seed
    while len(found) < count:
        seed += 1
        rng = random.Random(seed)
        graph = with_working_sets(random_taskgraph(rng, rng.choice(TIMED_SHAPES)), rng.choice((1.0, 1.3, 2.0)))
        if any(len(versions) > 1 for versions in lasting_versions(graph.vertices).values()):
            with contextlib.suppress(PlanError):
                found.append((graph, make_plan(graph, cyclic=rng.random() < 0.6, planner="timed")))
    return found


def random_plan(graph: TaskGraph, rng: random.Random) -> MemGraph:
    """Return a plan of ``graph`` on devices as large as it needs. Raises NoPlan."""
    return _Draft(graph, rng).plan()


@dataclass
class _Draft:
    """A plan up to one vertex: what copies of each value there are, and where."""

    graph: TaskGraph
    rng: random.Random
    vertices: list[Vertex] = field(default_factory=list)
    slots: dict[Ref, Slot] = field(default_factory=dict)
    """All that ever had one, in the order of writing."""
    held: dict[Ref, Ref] = field(default_factory=dict)
    """Copy on a device, not overwritten yet → its value."""
    host: dict[Ref, Ref] = field(default_factory=dict)
    """Value → what a reload of it reads, an offload or an input; for versions that a home holds too."""
    value: dict[Ref, Ref] = field(default_factory=dict)
    """Copy that the plan adds → its value."""
    pinned: set[Ref] = field(default_factory=set)
    host_memory: int = 0
    last_read: dict[Ref, int] = field(default_factory=dict)
    position: int = -1

    def __post_init__(self) -> None:
        self.order = serial_order(self.graph)
        self.task = {vertex.id: vertex for vertex in self.graph.vertices}
        self.fresh = max(self.task) + 1
        self.task_inputs = {(v.id, 0) for v in self.order if v.kind is VertexKind.INPUT}
        self.versions = lasting_versions(self.graph.vertices)
        self.state = {version: state for state, versions in self.versions.items() for version in versions}
        self.uses = HomeUses.of(self.graph)
        self.cyclic = self.rng.random() < 0.6
        self.behind = after_gate(self.order)
        for position, vertex in enumerate(self.order):
            self.last_read.update(dict.fromkeys(vertex.inputs, position))

    def plan(self) -> MemGraph:
        for vertex in self.order:
            if vertex.kind is VertexKind.INPUT:
                self._arrive(vertex)
        for position, vertex in enumerate(self.order):
            self.position = position
            if vertex.kind is not VertexKind.INPUT:
                self._run(vertex)
                self._shuffle()
        self.position = len(self.order)
        self._end()
        for vertex in self.graph.vertices:
            for k in range(len(vertex.sizes)):
                self._check_handed_out(vertex, (vertex.id, k))
        vertices = tuple(self.vertices)
        data = data_edges(vertices)
        devices = []
        for device in self.graph.devices:
            ends = [self._end_of(ref) for ref, slot in self.slots.items() if slot.space == device.id]
            devices.append(replace(device, memory=max(ends, default=1)))
        spaces = (*devices, Space(HOST, self.host_memory, _UNIT, SpaceKind.HOST))
        edges = self._memory_edges(data)
        return MemGraph(self.graph.name, spaces, vertices, self.slots, data, edges, self.cyclic)

    def _arrive(self, vertex: Vertex) -> None:
        ref = (vertex.id, 0)
        self.vertices.append(vertex)
        if host_copy_exists(vertex):
            self.host[ref] = ref
        if is_foreign(vertex) or not vertex.sizes[0] or not outlives_step(vertex) or self.uses.never_moves(vertex):
            return
        if host_copy_exists(vertex) and self.rng.random() < 0.5:
            return
        self._hold(ref, ref, None)
        if arrives_at_gate(vertex):
            self.pinned.add(ref)

    def _hold(self, copy: Ref, value: Ref, addr: int | None) -> None:
        device, size = self._device_of(value), self.task[value[0]].sizes[value[1]]
        taken = [
            (self.slots[other].offset, self._end_of(other)) for other in self.held if self.slots[other].space == device
        ]
        begins = [-(-end // _UNIT) * _UNIT for _, end in taken]
        free = [b for b in sorted({0, *begins}) if all(b + size <= first or end <= b for first, end in taken)]
        self.slots[copy] = Slot(device, self.rng.choice(free[:2]) if addr is None else addr)
        self.held[copy] = value
        if handed_out_at_gate(self.task[copy[0]] if copy[0] in self.task else self.task[value[0]]) and copy == value:
            self.pinned.add(copy)

    def _end_of(self, copy: Ref) -> int:
        """Where the bytes of a copy end in its space."""
        return self.slots[copy].offset + self._size(copy)

    def _size(self, copy: Ref) -> int:
        value = copy if copy[0] in self.task else self.value[copy]
        return self.task[value[0]].sizes[value[1]]

    def _device_of(self, value: Ref) -> int:
        return self.uses.device_of(value, self.task[value[0]])

    def _copies(self, value: Ref) -> list[Ref]:
        return [copy for copy, of in self.held.items() if of == value]

    def _needed(self, value: Ref) -> bool:
        """Whether ``value`` is read after the present vertex, or wanted when the step ends."""
        vertex = self.task[value[0]]
        state = self.state.get(value)
        lasts = state is not None and self.versions[state][-1] == value != state
        wanted = must_survive_step(vertex) or handed_out_at_gate(vertex)
        return lasts or wanted or self.last_read.get(value, -1) > self.position

    def _copy(self, source: Ref, value: Ref, ends: tuple[int, int], op: str) -> Ref:
        size = self.task[value[0]].sizes[value[1]]
        copy = Vertex(self.fresh, VertexKind.COPY, ends[1], op, (source,), (size,), source=ends[0])
        self.fresh += 1
        self.vertices.append(copy)
        self.value[copy.id, 0] = value
        return copy.id, 0

    def _reload(self, value: Ref, addr: int | None = None) -> Ref:
        copy = self._copy(self.host[value], value, (HOST, self._device_of(value)), "reload")
        self._hold(copy, value, addr)
        return copy

    def _offload(self, copy: Ref) -> None:
        value = self.held[copy]
        state = self.state.get(value)
        if state is not None:
            self._replace_home(state, value)
        offload = self._copy(copy, value, (self._device_of(value), HOST), "offload")
        self.host[value] = offload
        if state is None:
            self.slots[offload] = Slot(HOST, self.host_memory)
            self.host_memory += -(-self._size(copy) // _UNIT) * _UNIT

    def _lost_with_home(self, state: Ref, value: Ref) -> bool:
        """Whether something is lost once the home of ``state`` has ``value``."""
        return any(
            version in self.host
            and version != value
            and ((self._needed(version) and not self._copies(version)) or self._handed_out_at_home(version))
            for version in self.versions[state]
        )

    def _handed_out_at_home(self, version: Ref) -> bool:
        return self.host[version] == version and version in self.uses.written and self.task[version[0]].out

    def _replace_home(self, state: Ref, value: Ref) -> None:
        if self._lost_with_home(state, value):
            raise NoPlan
        for version in self.versions[state]:
            self.host.pop(version, None)

    def _lose(self, copy: Ref) -> None:
        """Take ``copy`` off the device."""
        self._save(copy)
        del self.held[copy]

    def _save(self, copy: Ref) -> None:
        """Offload ``copy`` if it is the only one of a value that is needed."""
        value = self.held[copy]
        if copy in self.pinned:
            raise NoPlan
        if self._needed(value) and value not in self.host and self._copies(value) == [copy]:
            self._offload(copy)

    def _load(self, value: Ref) -> Ref:
        vertex = self.task[value[0]]
        if is_foreign(vertex) or not vertex.sizes[value[1]]:
            return value
        copies = self._copies(value)
        if copies and (value not in self.host or self.rng.random() < 0.9):
            return self.rng.choice(copies)
        if value not in self.host:
            raise NoPlan
        return self._reload(value)

    def _at_home(self, value: Ref) -> Ref:
        """What a kernel on the host reads, which uses ``value`` at its home."""
        copies = self._copies(value)
        if not self.task[value[0]].sizes[value[1]]:
            return value
        if value not in self.host:
            if not copies:
                raise NoPlan
            self._offload(self.rng.choice(copies))
        return self.host[value]

    def _run(self, vertex: Vertex) -> None:
        at_home = {value for value in vertex.inputs if self.uses.at_home(vertex, value)}
        loaded = {value: self._load(value) for value in dict.fromkeys(vertex.inputs) if value not in at_home}
        read = loaded | {value: self._at_home(value) for value in dict.fromkeys(vertex.inputs) if value in at_home}
        sized = [value for value in at_home if self.task[value[0]].sizes[value[1]]]
        if any(self.host.get(value) != read[value] for value in sized):
            raise NoPlan  # Two versions of one value, for which its home has no room.
        on_device = {value for value, copy in loaded.items() if copy in self.held}
        over: dict[int, Ref] = {k: read[value] for k, value in overwrites(vertex) if value in on_device}
        taken = [read[vertex.inputs[p]] for p in vertex.may_inplace if vertex.inputs[p] in on_device]
        taken = [copy for copy in taken if copy not in over.values() and self._size(copy) >= vertex.sizes[0]]
        if taken and vertex.sizes[0] and 0 not in over and self.rng.random() < 0.5:
            over[0] = self.rng.choice(taken)
        places = {}
        for k, copy in over.items():
            reserved = copy in self.pinned
            # The place of what arrives at the gate is no other's, also where a smaller output takes it over.
            if reserved and (vertex.id not in self.behind or vertex.sizes[k] < self._size(copy)):
                raise NoPlan
            self.pinned.discard(copy)
            self._save(copy)
            places[k] = (self.slots[copy].offset, reserved)
        self.vertices.append(replace(vertex, inputs=tuple(read[value] for value in vertex.inputs)))
        # No output that is not written over an input may lie on one.
        for k, size in enumerate(vertex.sizes):
            if size and (vertex.id, k) in self.uses.written:
                self._replace_home(self.state[vertex.id, k], (vertex.id, k))
                self.host[vertex.id, k] = (vertex.id, k)
            elif size and k not in places and not is_foreign(vertex):
                self._hold((vertex.id, k), (vertex.id, k), None)
        for k, (addr, reserved) in places.items():
            del self.held[over[k]]
            if vertex.sizes[k]:
                self._hold((vertex.id, k), (vertex.id, k), addr)
                self.pinned |= {(vertex.id, k)} if reserved else set()

    def _shuffle(self) -> None:
        """Let some values go, and bring or write some for no reason."""
        for copy in list(self.held):
            if copy in self.held and copy not in self.pinned and self.rng.random() < 0.25:
                self._lose(copy)
        for state in self.versions:
            copies = [copy for copy in self.held if self.state.get(self.held[copy]) == state]
            if copies and self.rng.random() < 0.2:
                copy = self.rng.choice(copies)
                if not self.uses.hosts or not self._lost_with_home(state, self.held[copy]):
                    self._offload(copy)

    def _end(self) -> None:
        """Leave each value that lives over steps where the next step looks for it."""
        for vertex in self.graph.vertices:
            missing_at_home, missing_in_place = self._missing(vertex)
            last = self._last((vertex.id, 0))
            if last not in self.host and (missing_at_home or missing_in_place):
                self._offload(self.rng.choice(self._copies(last)))
            if missing_in_place:
                self._bring_back((vertex.id, 0), last)
        if any(any(self._missing(vertex)) for vertex in self.graph.vertices):
            raise NoPlan

    def _uses_home(self, vertex: Vertex, ref: Ref) -> bool:
        """Whether ``vertex``, of the plan, reads the INPUT ``ref`` at its home."""
        if swaps_in(vertex):
            return ref in self.task_inputs
        return vertex.id in self.task and ref in self.task_inputs and self.uses.at_home(self.task[vertex.id], ref)

    def _last(self, ref: Ref) -> Ref:
        return self.versions[ref][-1] if ref in self.versions else ref

    def _missing(self, vertex: Vertex) -> tuple[bool, bool]:
        """Whether the last version of an input that lives over steps is missing at home, or on the device."""
        ref = (vertex.id, 0)
        if not host_copy_exists(vertex) or not vertex.sizes[0]:
            return False, False
        last = self._last(ref)
        resident = self.cyclic and ref in self.slots
        loaded = any(ref in v.inputs and self._uses_home(v, ref) for v in self.vertices)
        copies = self._copies(last) if resident else []
        in_place = [copy for copy in copies if self.slots[copy].offset == self.slots[ref].offset]
        at_home = last == ref or last in self.host
        return not at_home and (not resident or loaded), resident and not in_place

    def _check_handed_out(self, vertex: Vertex, ref: Ref) -> None:
        """What a home holds before the step is not there when it has ended, if the value was changed."""
        wanted = must_survive_step(vertex) and not is_foreign(vertex) and vertex.sizes[ref[1]]
        changed = len(self.versions.get(ref, ())) > 1
        if wanted and not self._copies(ref) and (ref not in self.host or (changed and self.host[ref] == ref)):
            raise NoPlan

    def _bring_back(self, ref: Ref, last: Ref) -> None:
        slot = self.slots[ref]
        for copy in list(self.held):
            other = self.slots[copy]
            apart = other.offset >= self._end_of(ref) or slot.offset >= self._end_of(copy)
            if other.space == slot.space and not apart:
                self._lose(copy)
        if last not in self.host:
            raise NoPlan
        self._reload(last, slot.offset)

    def _memory_edges(self, data: Iterable[Edge]) -> tuple[Edge, ...]:
        """Edges from all users of what a content replaces, those that follow from others left out."""
        kind = {vertex.id: vertex.kind for vertex in self.vertices}
        users: dict[Ref, list[int]] = defaultdict(list)
        memory: dict[int, Occupants] = defaultdict(Occupants)
        homes: dict[Ref, Ref] = {}
        value: dict[Ref, Ref] = {}
        pairs: list[Edge] = []
        for vertex in self.vertices:
            for ref in dict.fromkeys(vertex.inputs):
                at_home = self._uses_home(vertex, ref)
                users[(ref[0], -1) if at_home else ref].append(vertex.id)
        for vertex in self.vertices:
            written: list[Ref] = []
            for k in range(len(vertex.sizes)):
                ref = (vertex.id, k)
                copied = swaps(vertex)
                value[ref] = value[vertex.inputs[0]] if copied else ref
                slot = self.slots.get(ref)
                if slot is not None:
                    written += memory[slot.space].replace(slot.offset, self._end_of(ref), ref)
            state = self.state.get(value[vertex.id, 0])
            if swaps_out(vertex) and state is not None:
                written.append(homes.get(state, (state[0], -1)))
                homes[state] = (vertex.id, 0)
            for ref in ((vertex.id, k) for k, size in enumerate(vertex.sizes) if size):
                if ref in self.uses.written:
                    written.append(homes.get(self.state[ref], (self.state[ref][0], -1)))
                    homes[self.state[ref]] = ref
            for former in written:
                before = users[former] or [former[0]]
                pairs += [(u, vertex.id) for u in before if u != vertex.id and kind[u] is not VertexKind.INPUT]
        return _needed_edges(tuple(self.vertices), tuple(data), tuple(dict.fromkeys(pairs)))


def _needed_edges(vertices: tuple[Vertex, ...], data: tuple[Edge, ...], memory: tuple[Edge, ...]) -> tuple[Edge, ...]:
    """Return those of ``memory`` that do not follow from the other edges; ``vertices`` in a topological order."""
    before: dict[int, set[int]] = defaultdict(set)
    direct: dict[int, set[int]] = defaultdict(set)
    added = set(memory) - set(data)
    for u, v in (*data, *added):
        direct[v].add(u)
    needed = []
    for vertex in vertices:
        for u in direct[vertex.id]:
            before[vertex.id] |= {u} | before[u]
        follow = {u for other in direct[vertex.id] for u in before[other]}
        needed += [(u, vertex.id) for u in direct[vertex.id] - follow if (u, vertex.id) in added]
    return tuple(sorted(needed))
