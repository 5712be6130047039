"""The bound of any plan for a step that has run, from the time that its kernels took."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from disco_accel.graph.taskgraph import VertexKind
from disco_accel.plan.bound import bound_of
from disco_accel.simulate.simulator import Machine
from disco_accel.step.compiled_step import CompiledStep


def kernel_seconds(step: CompiledStep, run: Callable[[], object]) -> dict[int, float]:
    """Seconds of each kernel, by vertex, in the one step that ``run`` makes."""
    step.executor.set_tracing(True)
    try:
        run()
        return {e.vertex: e.end - e.start for e in step.executor.events() if e.lane.startswith("compute")}
    finally:
        step.executor.set_tracing(False)


def any_plan_of(step: CompiledStep, seconds: Mapping[int, float], machine: Machine) -> float:
    """Seconds that no repeating plan in the captured order beats in the step's arena; ``seconds`` of each kernel."""
    vertices = tuple(
        dataclasses.replace(v, duration=seconds[v.id]) if v.kind is VertexKind.KERNEL else v
        for v in step.graph.vertices
    )
    return bound_of(dataclasses.replace(step.graph, vertices=vertices), machine).bound
