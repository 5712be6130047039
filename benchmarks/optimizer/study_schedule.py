"""The study's own schedule in simulated time: a gradient flush that blocks, then updates, then copies that block.

Each gradient of the last micro-batch is copied to pageable memory, and the next kernel waits for it. When the backward
has ended, the processors update piece after piece, and wait for the copy of each piece's weights to the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.optimizer.step_graph import BACKWARD, UPDATE, StepOptions, kernels_named, step_graph
from benchmarks.optimizer.study import WEIGHT, Study
from disco_accel.graph.memgraph import Edge, MemGraph
from disco_accel.graph.spaces import HOST
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.simulate.simulator import Machine, Simulation, simulate

PROCESSORS = 1
"""The processors, as a compute resource of the simulation."""


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of a step: one ``forward``; ``backward`` of the first micro-batch and ``flushing_backward`` of the last;
    ``update`` with its copies; all of it."""

    forward: float
    backward: float
    flushing_backward: float
    update: float
    step: float


def study_schedule(study: Study) -> tuple[MemGraph, Machine]:
    """Return the schedule as a plan without addresses, and the machine with the rates of blocking copies."""
    graph = step_graph(study, StepOptions(pieces=1))
    schedule = _Blocking(graph, study)
    plan = MemGraph(
        name="the study's own schedule",
        spaces=graph.spaces,
        vertices=tuple(schedule.vertices),
        slots={},
        data_edges=tuple(schedule.edges),
        memory_edges=(),
    )
    return plan, study.machine.blocking_links(study.model, study.measured)


def simulated_phases(study: Study) -> tuple[Phases, Simulation]:
    """Run the schedule in simulated time."""
    plan, machine = study_schedule(study)
    run = simulate(plan, machine)
    by_id, lanes = {vertex.id: vertex for vertex in plan.vertices}, machine.lanes(plan.spaces)

    def end(vertex: int) -> float:
        return run.starts[vertex] + lanes.seconds(by_id[vertex])

    kernels = [v for v in plan.vertices if v.kind is VertexKind.KERNEL]
    losses = [end(v.id) for v in kernels if v.op == "loss"]
    heads = [run.starts[v.id] for v in kernels if v.op == "embed"]
    first_update = min(run.starts[v.id] for v in kernels if v.op == UPDATE)
    phases = Phases(
        forward=losses[0] - heads[0],
        backward=heads[1] - losses[0] if len(heads) > 1 else 0.0,
        flushing_backward=first_update - losses[-1],
        update=run.makespan - first_update,
        step=run.makespan,
    )
    return phases, run


class _Blocking:
    """All of a step in one chain: kernels in order, with what each waits for."""

    def __init__(self, graph: TaskGraph, study: Study) -> None:
        self.vertices: list[Vertex] = [v for v in graph.vertices if v.kind is VertexKind.INPUT]
        self.edges: list[Edge] = []
        self.last: int | None = None
        updates = {v.inputs[2][0]: v for v in kernels_named(graph, UPDATE)}
        self.next_id = max(v.id for v in graph.vertices) + 1
        for vertex in kernels_named(graph, "embed", "forward", "loss", *BACKWARD):
            self._behind_last(vertex)
            if vertex.id in updates:
                size = vertex.sizes[:1]
                self._behind_last(self._copy(0, HOST, "flush", (vertex.id, 0), size))
        for update in updates.values():
            seconds = study.machine.host_seconds(update.sizes[0] // WEIGHT)
            self._behind_last(Vertex(update.id, VertexKind.KERNEL, PROCESSORS, UPDATE, (), update.sizes, seconds))
            self._behind_last(self._copy(HOST, 0, "updated weight", (update.id, 0), update.sizes[:1]))

    def _copy(self, source: int, space: int, op: str, value: Ref, sizes: tuple[int, ...]) -> Vertex:
        self.next_id += 1
        return Vertex(self.next_id, VertexKind.COPY, space, op, (value,), sizes, source=source)

    def _behind_last(self, vertex: Vertex) -> None:
        if self.last is not None:
            self.edges.append((self.last, vertex.id))
        self.vertices.append(vertex)
        self.last = vertex.id


def deviations(study: Study, phases: Phases) -> Iterator[tuple[str, float, float]]:
    """Each figure of the study's table: its name, as simulated, as measured."""
    measured = study.measured
    yield "forward", phases.forward, measured.forward
    yield "backward", phases.backward, measured.backward
    yield "backward with flush", phases.flushing_backward, measured.flushing_backward
    yield "update", phases.update, measured.update
    yield "step", phases.step, measured.step
    yield "TFLOPS", study.teraflops(phases.step), measured.teraflops
