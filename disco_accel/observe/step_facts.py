"""Facts of a step that its plan does not have: names of inputs, modules of kernels, and which repeat or fuse others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from disco_accel.graph.taskgraph import TaskGraph, is_fused
from disco_accel.graph.value_numbering import clones


@dataclass(frozen=True, slots=True)
class _StepFacts:
    """By vertex. ``names``: of the tensors of INPUTs. ``modules``: dotted paths of the modules that issued kernels.
    ``repeats``: kernel → an earlier one with the same bits. ``fused``: kernel → how many calls it computes in one."""

    names: Mapping[int, str] = field(default_factory=dict)
    modules: Mapping[int, str] = field(default_factory=dict)
    repeats: Mapping[int, int] = field(default_factory=dict)
    fused: Mapping[int, int] = field(default_factory=dict)

    def args(self, vertex: int) -> dict[str, int | str]:
        """Those of a kernel that has some, by the keys of its row in a trace."""
        found: dict[str, int | str] = {}
        if module := self.modules.get(vertex):
            found["module"] = module
        if vertex in self.repeats:
            found["repeats"] = self.repeats[vertex]
        if vertex in self.fused:
            found["fused"] = self.fused[vertex]
        return found


NO_FACTS = _StepFacts()
"""Of a plan whose graph is not known."""


def step_facts(graph: TaskGraph, names: Mapping[int, str]) -> _StepFacts:
    """The facts of plans of ``graph``, which has its calls. ``names``: INPUT vertex → tensor."""
    modules = {vertex: call.module for vertex, call in graph.ops.items() if call.module}
    repeats = {clone.vertex: clone.original for clone in clones(graph)}
    fused = {vertex: len(call.body) for vertex, call in graph.ops.items() if is_fused(call)}
    return _StepFacts(dict(names), modules, repeats, fused)
