"""A plan of seven vertices with every kind of content, and the events of one run of it."""

from __future__ import annotations

from dataclasses import dataclass

from disco_accel.graph.memgraph import MemGraph, Slot
from disco_accel.graph.spaces import HOST, Space, SpaceKind
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import FROZEN
from disco_accel.simulate.simulator import Machine, simulate

W0, W1, A, L, B, C, SAVE, BACK, LOSS = range(9)


@dataclass(frozen=True)
class Event:
    """What the executor traces, by hand."""

    vertex: int
    lane: str
    issue: float
    start: float
    end: float
    bytes: int = 0


def plan() -> MemGraph:
    """w0 stays, w1 is streamed; a is saved and comes back; c is written over b; the loss is kept."""
    k = VertexKind
    vertices = (
        Vertex(W0, k.INPUT, 0, op="w0", sizes=(256,), traits=FROZEN),
        Vertex(W1, k.INPUT, 0, op="w1", sizes=(512,), traits=FROZEN),
        Vertex(A, k.KERNEL, 0, op="aten::mm", inputs=((W0, 0),), sizes=(256,)),
        Vertex(SAVE, k.COPY, HOST, inputs=((A, 0),), sizes=(256,), source=0),
        Vertex(L, k.COPY, 0, inputs=((W1, 0),), sizes=(512,)),
        Vertex(B, k.KERNEL, 0, op="aten::mul", inputs=((L, 0),), sizes=(512,)),
        Vertex(BACK, k.COPY, 0, inputs=((SAVE, 0),), sizes=(256,)),
        Vertex(C, k.KERNEL, 0, op="aten::add_", inputs=((B, 0), (BACK, 0)), sizes=(512,), inplace=((0, 0),)),
        Vertex(LOSS, k.KERNEL, 0, op="aten::sum", inputs=((C, 0),), sizes=(256,), out=True, keep=True),
    )
    slots = {
        (W0, 0): Slot(0, 0),
        (A, 0): Slot(0, 256),
        (L, 0): Slot(0, 512),
        (B, 0): Slot(0, 1024),
        (BACK, 0): Slot(0, 256),
        (C, 0): Slot(0, 1024),
        (LOSS, 0): Slot(0, 512),
        (SAVE, 0): Slot(HOST, 0),
    }
    spaces = (Space(0, 2048), Space(HOST, 256, 1, SpaceKind.HOST))
    return MemGraph("small", spaces, vertices, slots, (), (), cyclic=True)


def events() -> list[Event]:
    """Kernels one after another, copies beside them; times are small whole numbers of seconds."""
    return [
        Event(A, "compute0", 0, 0, 2),
        Event(L, "h2d", 0, 0, 3, 512),
        Event(SAVE, "d2h", 2, 2, 4, 256),
        Event(B, "compute0", 3, 3, 5),
        Event(BACK, "h2d", 4, 4, 6, 256),
        Event(C, "compute0", 6, 6, 7),
        Event(LOSS, "compute0", 7, 7, 8),
    ]


def simulated(plan: MemGraph) -> list[Event]:
    """The events of a plan in simulated time."""
    machine = Machine()
    lanes, starts = machine.lanes(plan.spaces), simulate(plan, machine).starts
    events = []
    for vertex in plan.vertices:
        if vertex.kind is VertexKind.INPUT:
            continue
        copies = vertex.kind is VertexKind.COPY
        lane = lanes.route_name(vertex.source, vertex.space) if copies else "compute0"
        start = starts[vertex.id]
        nbytes = vertex.sizes[0] if copies else 0
        events.append(Event(vertex.id, lane, start, start, start + lanes.seconds(vertex), nbytes))
    return events


def graph_of(vertices: tuple[Vertex, ...], memory: int) -> TaskGraph:
    """A graph on one device."""
    return TaskGraph("small", (Space(0, memory),), vertices)
