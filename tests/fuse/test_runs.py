"""Runs of a captured graph: which kernels they join, and that the graph computes what it did."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from disco_accel.capture.captured_step import CapturedStep
from disco_accel.fuse.call_json import call_of, call_to_object, kernel_text
from disco_accel.fuse.fused_runs import FUSED, FusedCost, fused_runs, kind_of, runs_of
from disco_accel.graph.check import after_gate, check_taskgraph
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.op_traits import op_traits
from disco_accel.graph.spaces import SpaceKind
from disco_accel.graph.taskgraph import OpCall, TaskGraph, VertexKind, is_fused
from disco_accel.plan import make_plan
from disco_accel.verify.static import verify
from tests.capture.steps import Case, capture, run_captured, run_eager
from tests.support.models import TEN_FAMILIES, family_lora, random_batch


def everything(call: OpCall) -> FusedCost:
    """As if there were a fast kernel for every run."""
    return 1e-9, ()


def timed(step: CapturedStep) -> CapturedStep:
    """Each kernel of ``step`` is said to take a microsecond."""
    vertices = tuple(replace(v, duration=1e-6) if v.kind is VertexKind.KERNEL else v for v in step.graph.vertices)
    return replace(step, graph=replace(step.graph, vertices=vertices))


def with_runs(step: CapturedStep) -> CapturedStep:
    return replace(step, graph=check_taskgraph(fused_runs(step.graph, everything)))


def traffic(graph: TaskGraph) -> int:
    """Bytes that pointwise kernels read and write."""
    by_id = {vertex.id: vertex for vertex in graph.vertices}
    total = 0
    for id_, call in graph.ops.items():
        if is_fused(call) or op_traits(call.name).fuses:
            total += sum(by_id[producer].sizes[output] for producer, output in set(by_id[id_].inputs))
            total += sum(by_id[id_].sizes)
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", TEN_FAMILIES)
def test_a_graph_with_runs_computes_what_eager_does(family: str, dtype: torch.dtype) -> None:
    """Op by op inside each run, on the step's own values; far fewer kernels, and much less of their traffic."""
    model, batch = family_lora(family, dtype=dtype), random_batch(vocabulary=96)
    step = timed(capture(model, batch))
    fused = with_runs(step)
    loss, gradients = run_eager(model, batch, nullcontext())
    got, made = run_captured(fused, model, batch)
    assert torch.equal(got, loss)
    assert gradients.keys() == made.keys()
    assert all(torch.equal(made[name], gradients[name]) for name in gradients)
    runs = [call for call in fused.graph.ops.values() if is_fused(call)]
    assert len(fused.graph.ops) < 0.7 * len(step.graph.ops)
    assert traffic(fused.graph) < 0.6 * traffic(step.graph)
    assert all(call.name == FUSED and len(call.body) > 1 for call in runs)


def test_nothing_crosses_the_gate() -> None:
    """Kernels behind the gate stay there, the others in front of it."""
    step = timed(capture(Case(checkpointing=True).model(), Case().batch()))
    behind = after_gate(step.graph.vertices)
    fused = fused_runs(step.graph, everything)
    still = after_gate(fused.vertices)
    for vertex in fused.vertices:
        if vertex.id in fused.ops and not is_fused(fused.ops[vertex.id]):
            assert (vertex.id in behind) == (vertex.id in still)
    count = [sum(len(c.body) or 1 for i, c in fused.ops.items() if (i in still) == side) for side in (True, False)]
    assert count == [len(step.graph.ops.keys() & behind), len(step.graph.ops.keys() - behind)]


@pytest.mark.parametrize("planner", ["build", "timed"])
def test_plans_of_a_graph_with_runs_are_verified(planner: str) -> None:
    """In the least memory that the graph needs, and in all."""
    step = with_runs(timed(capture(Case(checkpointing=True).model(), Case().batch())))
    for memory in (90_112, 1 << 20):
        graph = replace(step.graph, spaces=tuple(replace(s, memory=memory) for s in step.graph.spaces))
        plan: MemGraph = make_plan(graph, memory=memory, planner=planner, cyclic=True)
        verify(graph, plan)


def test_a_run_without_a_kernel_or_with_a_slow_one_stays_apart() -> None:
    """Its kernels are those of the graph without runs, in an order that works."""
    graph = timed(capture(Case().model(), Case().batch())).graph
    none = check_taskgraph(fused_runs(graph, lambda call: None))
    assert none.ops == graph.ops
    assert sorted(none.vertices, key=lambda v: v.id) == sorted(graph.vertices, key=lambda v: v.id)
    assert fused_runs(graph, lambda call: (1.0, ())).ops == graph.ops


def test_kinds_that_are_kept_apart_are_in_no_run() -> None:
    """As those whose bits a compiler changes."""
    graph = timed(capture(Case().model(), Case().batch())).graph
    mul = next(kind_of(call) for call in graph.ops.values() if call.name == "aten::mul")
    runs = runs_of(graph, {mul}).calls
    assert runs
    assert not any(kind_of(inner) == mul for call in runs.values() for inner in call.body)
    assert any(kind_of(inner) == mul for call in runs_of(graph).calls.values() for inner in call.body)


def test_calls_go_through_json() -> None:
    """The compiling process gets the calls that were sent."""
    graph = timed(capture(Case(base=torch.bfloat16, padded=True, attention="eager").model(), Case().batch())).graph
    runs = runs_of(graph).calls
    assert runs
    for name, call in runs.items():
        assert call_of(call_to_object(call)) == replace(call, module="")
        assert kernel_text(call_of(call_to_object(call))) == name


def test_kernels_of_a_device_in_host_memory_are_in_no_run() -> None:
    """Fused kernels are compiled for the device beside it: of a step that runs in host memory alone there are none."""
    graph = timed(capture(Case().model(), Case().batch())).graph
    assert runs_of(graph).calls
    spaces = (replace(graph.spaces[0], kind=SpaceKind.HOST), *graph.spaces[1:])
    assert runs_of(replace(graph, spaces=spaces)).calls == {}
