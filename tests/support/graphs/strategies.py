"""Random task graphs with every feature of the schema, for property tests."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from disco_accel.graph.check import after_gate, check_taskgraph
from disco_accel.graph.home_uses import HomeUses, host_devices
from disco_accel.graph.spaces import HOST, Space, SpaceKind
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind, with_memory
from disco_accel.graph.traits import (
    FOREIGN,
    FROZEN,
    HOST_UPDATED,
    HOST_UPDATED_STATE,
    LATE,
    LATE_FOREIGN,
    MADE_FOREIGN,
    PER_STEP,
    STATE,
    Traits,
)
from disco_accel.graph.values import arrives_at_gate, handed_out_at_gate, host_copy_exists, is_foreign

_SIZES = (0, 1, 256, 300, 512, 512, 1024, 1024, 2048, 3000)


_TRAITS = {
    **{"clean": FROZEN, "host_updated": HOST_UPDATED, "plain": PER_STEP},
    **{"external": FOREIGN, "late": LATE, "late external": LATE_FOREIGN},
}


@dataclass(frozen=True, slots=True)
class Shape:
    """How large and how odd a random graph is; the probabilities are per vertex.

    ``states``: of an input that lives over steps and changes, and of a kernel that changes some of those.
    ``host_updated``: of any other input that the host has, that the host changes it between steps.
    ``host``: of an input and a vertex, that it is on one more device, which is the host's.
    ``leaving``: of a transfer to that device, that it writes to the user's memory.
    ``old_versions``: whether versions of these are read, or handed out, also after they were overwritten.
    """

    vertices: int = 24
    inputs: int = 6
    devices: int = 2
    gate: bool = True
    keep: float = 0.1
    inplace: float = 0.1
    may_inplace: float = 0.25
    several_outputs: float = 0.2
    after: float = 0.1
    states: float = 0.0
    host_updated: float = 0.0
    host: float = 0.0
    leaving: float = 0.0
    old_versions: bool = False


def random_taskgraph(rng: random.Random, shape: Shape | None = None) -> TaskGraph:
    """Return a valid random graph whose devices are large enough for everything at once (see ``with_working_sets``)."""
    shape = shape or Shape()
    maker = _Maker(rng, shape)
    for _ in range(rng.randint(1, shape.inputs)):
        maker.add_input()
    for _ in range(rng.randint(1, shape.vertices)):
        maker.add_vertex()
    return maker.finish()


def working_set(graph: TaskGraph, device: int) -> int:
    """Return the bytes of the largest vertex on ``device``: inputs and outputs together, each rounded up."""
    align = next(d.alignment for d in graph.devices if d.id == device)
    by_id = {vertex.id: vertex for vertex in graph.vertices}
    uses = HomeUses.of(graph)
    largest = 0
    for vertex in graph.vertices:
        refs: set[Ref] = {
            ref for ref in vertex.inputs if not is_foreign(by_id[ref[0]]) and not uses.at_home(vertex, ref)
        }
        refs |= {
            (vertex.id, k)
            for k in range(len(vertex.sizes))
            if not is_foreign(vertex) and (vertex.id, k) not in uses.written
        }
        sizes = [by_id[v].sizes[k] for v, k in refs if uses.device_of((v, k), by_id[v]) == device]
        largest = max(largest, sum(-(-size // align) * align for size in sizes))
    return largest


def with_working_sets(graph: TaskGraph, factor: float) -> TaskGraph:
    """Return ``graph`` with arenas of ``factor`` times the largest working set of each device but the host's."""
    return with_memory(graph, lambda device: max(1, int(working_set(graph, device.id) * factor)))


def held(graph: TaskGraph, device: int) -> tuple[int, int]:
    """Return the bytes on ``device`` that may not leave, and those of the inputs that are there when a step starts.

    Results that are handed out and late inputs keep their place; plain inputs may leave later, clean ones at once.
    """
    align = next(d.alignment for d in graph.devices if d.id == device)
    fixed = started = 0
    for vertex in graph.vertices:
        if vertex.space == device and not is_foreign(vertex):
            block = sum(-(-size // align) * align for size in vertex.sizes)
            fixed += block if handed_out_at_gate(vertex) or arrives_at_gate(vertex) else 0
            started += (
                block
                if vertex.kind is VertexKind.INPUT and not host_copy_exists(vertex) and not arrives_at_gate(vertex)
                else 0
            )
    return fixed, started


def with_room(graph: TaskGraph, factor: float) -> TaskGraph:
    """Return ``graph`` with arenas of ``factor`` times the working set of each device but the host's.

    That is what may not leave, beside the larger of the largest vertex and the inputs there at the start.
    """

    def memory(device: Space) -> int:
        fixed, started = held(graph, device.id)
        return max(1, int(factor * (fixed + max(started, working_set(graph, device.id)))))

    return with_memory(graph, memory)


@st.composite
def taskgraphs(draw: st.DrawFn, shape: Shape | None = None) -> TaskGraph:
    """Random task graphs; shrinks towards small ones."""
    return random_taskgraph(draw(st.randoms(use_true_random=False)), shape)


class _Maker:
    def __init__(self, rng: random.Random, shape: Shape) -> None:
        self.rng = rng
        self.shape = shape
        self.devices = tuple(Space(id, 1 << 40) for id in range(rng.randint(1, shape.devices)))
        if shape.host:
            self.devices += (Space(len(self.devices), 1 << 40, kind=SpaceKind.HOST),)
        self.hosts = host_devices(self.devices)
        self.vertices: list[Vertex] = []
        self.home: dict[Ref, Ref] = {}
        """What lies at a home: input that the host has, or a version of it → that input."""
        self.changed_on: dict[Ref, int] = {}
        """Input that lives over steps and was changed → the device on which."""
        self.last_version: dict[Ref, Ref] = {}
        """Input that lives over steps and changes → its last version so far."""
        self.versions: set[Ref] = set()

    def _size(self) -> int:
        return self.rng.choice(_SIZES)

    def _device(self) -> int:
        if self.hosts and self.rng.random() < self.shape.host:
            return len(self.devices) - 1
        return self.rng.randrange(len(self.devices) - len(self.hosts))

    def _device_of(self, ref: Ref) -> int:
        """Where copies of a value are that are not at home."""
        return self.vertices[self.home.get(ref, ref)[0]].space

    def _values_on(self, device: int) -> list[Ref]:
        """What a kernel on ``device`` may read."""
        values = [
            ref
            for ref in ((v.id, k) for v in self.vertices for k in range(len(v.sizes)))
            if self._device_of(ref) == device or (device in self.hosts and ref in self.home)
        ]
        old = set() if self.shape.old_versions else self.versions - set(self.last_version.values())
        return [ref for ref in values if ref not in old] if old else values

    def add_input(self) -> None:
        if self.shape.states and self.rng.random() < self.shape.states:
            self._add_state()
            return
        sort = self.rng.choice(("clean", "clean", "plain", "external", "late" if self.shape.gate else "clean"))
        if sort == "clean" and self.shape.host_updated and self.rng.random() < self.shape.host_updated:
            sort = "host_updated"
        late = sort == "late"
        if sort in ("clean", "host_updated"):
            self.home[len(self.vertices), 0] = (len(self.vertices), 0)
        self.vertices.append(
            Vertex(
                id=len(self.vertices),
                kind=VertexKind.INPUT,
                space=self._device(),
                op=f"in_{sort}",
                sizes=(self._size(),),
                traits=_TRAITS["late external" if late and self.rng.random() < 0.5 else sort],
                keep=self.rng.random() < self.shape.keep / 2,
            )
        )

    def _add_state(self) -> None:
        ref = (len(self.vertices), 0)
        keep = self.rng.random() < self.shape.keep / 2
        host_updated = self.shape.host_updated and self.rng.random() < self.shape.host_updated
        traits = HOST_UPDATED_STATE if host_updated else STATE
        self.last_version[ref] = self.home[ref] = ref
        self.versions.add(ref)
        self.vertices.append(
            Vertex(ref[0], VertexKind.INPUT, self._device(), "in_state", (), (self._size(),), traits=traits, keep=keep)
        )

    def add_vertex(self) -> None:
        rng, device = self.rng, self._device()
        values = self._values_on(device)
        states = [state for state in self.last_version if self._may_change(state, device)]
        if states and rng.random() < self.shape.states:
            self._add_update(device, rng.sample(states, rng.randint(1, min(3, len(states)))))
            return
        others = [ref for d in self.devices if d.id != device for ref in self._values_on(d.id) if self._moves(ref, d)]
        if others and rng.random() < 0.3:
            source = rng.choice(others)
            size = self._size_of(source)
            leaves = device in self.hosts and self.shape.leaving and rng.random() < self.shape.leaving
            leaves = leaves and not is_foreign(self.vertices[source[0]])
            sizes = (rng.choice((size, size // 2)),)
            self._append(VertexKind.COPY, device, (source,), sizes, MADE_FOREIGN if leaves else PER_STEP)
            return
        # Recent values are read more often, as in a real network; repeats are allowed.
        recent = values[-6:] if rng.random() < 0.7 else values
        inputs = tuple(rng.choice(recent) for _ in range(rng.randint(0, 3))) if recent else ()
        count = rng.choice((2, 2, 3)) if rng.random() < self.shape.several_outputs else 1
        self._append(VertexKind.KERNEL, device, inputs, tuple(self._size() for _ in range(count)))

    def _may_change(self, state: Ref, device: int) -> bool:
        """Whether a kernel on ``device`` may write the next version: all are written there, or all at home."""
        own = device in self.hosts or self.vertices[state[0]].space == device
        return own and self.changed_on.get(state, device) == device

    def _moves(self, ref: Ref, device: Space) -> bool:
        """Whether a transfer may read a value of ``device``: none does that a host device has at a home."""
        if ref not in self.home or not self.hosts:
            return True
        at_home = self.vertices[ref[0]].space in self.hosts
        return self._device_of(ref) == device.id and not device.is_host_device and not at_home

    def _add_update(self, device: int, states: list[Ref]) -> None:
        """Add a kernel that writes the next version of each of ``states``, from other values of ``device`` too."""
        rng = self.rng
        lost = {self.last_version[state]: state for state in states}
        others = [ref for ref in self._values_on(device) if ref not in lost]
        inputs = [*lost, *(rng.choice(others[-6:]) for _ in range(rng.randint(0, 2) if others else 0))]
        rng.shuffle(inputs)
        # Which output writes over which input, and outputs that are values of their own.
        outputs: list[Ref | None] = [*lost, *([None] * rng.choice((0, 0, 1)))]
        rng.shuffle(outputs)
        number = len(self.vertices)
        self.vertices.append(
            Vertex(
                id=number,
                kind=VertexKind.KERNEL,
                space=device,
                op=f"update{number}",
                inputs=tuple(inputs),
                sizes=tuple(self._size() if ref is None else self._size_of(ref) for ref in outputs),
                duration=rng.choice((None, 1e-5, 1e-4)),
                keep=rng.random() < self.shape.keep,
                inplace=tuple((k, inputs.index(ref)) for k, ref in enumerate(outputs) if ref is not None),
            )
        )
        for k, ref in enumerate(outputs):
            if ref is not None:
                self.last_version[lost[ref]] = (number, k)
                self.home[number, k] = lost[ref]
                self.changed_on[lost[ref]] = device
                self.versions.add((number, k))

    def _size_of(self, ref: Ref) -> int:
        return self.vertices[ref[0]].sizes[ref[1]]

    def _append(
        self,
        kind: VertexKind,
        device: int,
        inputs: tuple[Ref, ...],
        sizes: tuple[int, ...],
        traits: Traits = PER_STEP,
    ) -> None:
        rng, shape = self.rng, self.shape
        inplace: tuple[tuple[int, int], ...] = ()
        may: tuple[int, ...] = ()
        if kind is VertexKind.KERNEL and inputs:
            if rng.random() < shape.inplace:
                over = rng.randrange(len(inputs))
                foreign = is_foreign(self.vertices[inputs[over][0]])
                foreign |= device in self.hosts and inputs[over] in self.home
                # Versions of a value that changes over steps form one chain, which ``_add_update`` goes on with.
                if not foreign and inputs.count(inputs[over]) == 1 and inputs[over] not in self.versions:
                    inplace = ((0, over),)
                    sizes = (min(sizes[0], self._size_of(inputs[over])), *sizes[1:])
            if rng.random() < shape.may_inplace:
                may = tuple(sorted(rng.sample(range(len(inputs)), rng.randint(1, len(inputs)))))
        candidates = [v.id for v in self.vertices if v.kind is not VertexKind.INPUT]
        after = (rng.choice(candidates),) if candidates and rng.random() < shape.after else ()
        self.vertices.append(
            Vertex(
                id=len(self.vertices),
                kind=kind,
                space=device,
                op=f"k{len(self.vertices)}",
                inputs=inputs,
                sizes=sizes,
                duration=rng.choice((None, 1e-5, 1e-4)) if kind is VertexKind.KERNEL else None,
                traits=traits,
                source=self._device_of(inputs[0]) if kind is VertexKind.COPY else HOST,
                keep=rng.random() < shape.keep,
                after=after,
                inplace=inplace,
                may_inplace=may,
            )
        )

    def finish(self) -> TaskGraph:
        """Mark some vertices that do not depend on a late value as ``out``."""
        behind = after_gate(self.vertices)
        old = set() if self.shape.old_versions else self.versions - set(self.last_version.values())
        done = []
        for vertex in self.vertices:
            free = vertex.kind is not VertexKind.INPUT and vertex.id not in behind
            out = free and self.shape.gate and self.rng.random() < 0.08
            stays = not any((vertex.id, k) in old for k in range(len(vertex.sizes)))
            done.append(replace(vertex, out=out and stays, keep=vertex.keep and stays))
        return check_taskgraph(TaskGraph("random", self.devices, tuple(done)))
