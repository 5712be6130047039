"""The plan of a step with memory for everything: its kernels alone."""

from __future__ import annotations

from disco_accel.config.settings import DiscoConfig
from disco_accel.graph.copies import swaps_in
from disco_accel.graph.memgraph import MemGraph
from disco_accel.plan import make_plan
from disco_accel.step.compile.compiled_step import CompiledStep


def resident_plan(step: CompiledStep, config: DiscoConfig) -> MemGraph:
    """Plan ``step`` with the planner of ``config``; the result copies nothing."""
    room = 4 * (sum(sum(v.sizes) for v in step.graph.vertices) + step.budget.total)
    plan = make_plan(step.graph, memory=room, planner=config.planner, policy=config.policy, cyclic=True)
    assert not any(swaps_in(v) for v in plan.vertices), "nothing has to move where all fits"
    return plan
