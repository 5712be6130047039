"""The plans of a step that has run: the bound of any of them, and the end of their making."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping

import torch

from disco_accel.graph.taskgraph import VertexKind
from disco_accel.plan.bound.lower_bound import bound_of
from disco_accel.simulate.simulator import Machine
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.run.session import find_state


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


def wait_for_plans(model: torch.nn.Module, step: Callable[[], object] | None = None) -> None:
    """Wait until no plan of ``model``, which is prepared, is being made beside its steps. ``step``: runs one, between
    which compiled kernels are taken up; None: those that are being compiled are not waited for."""
    state = find_state(model)
    assert state is not None, "the model is prepared"
    plan_sets = state.budgets.plan_sets
    while not plan_sets.maker.idle or (step is not None and plan_sets.compiling):
        time.sleep(0.05)
        if step is not None:
            step()
