"""Weights in ranges of bytes on the engine: bits as eager's, whatever starts first, and after others used the arena."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from disco_accel.errors import ExecutionError
from disco_accel.execute.executor import EngineOptions, Executor
from disco_accel.graph.copies import is_resident_range, ranged_values, swaps_in
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.graph.taskgraph import TaskGraph, VertexKind, with_memory
from disco_accel.measure.record import OpRecord
from disco_accel.plan.timed.search import build_timed
from disco_accel.plan.timed.search_settings import TimedSettings
from disco_accel.simulate.simulator import Link, Machine
from disco_accel.verify.static import verify
from tests.execute.programs import Builder, assert_bits, build, measured, step

_LINK = Link(1e9, 0.0)
_SETTINGS = TimedSettings(range_shares=(0.1, 0.05), min_gap_ratios=(None,))


def products(builder: Builder, rng: torch.Generator) -> None:
    """Products with weights of 4 KiB, forward and back again."""
    weights = [builder.weight(torch.randn(32, 32, generator=torch.Generator().manual_seed(i))) for i in range(6)]
    value = builder.input(torch.randn(2, 32, generator=rng))
    for weight in (*weights, *reversed(weights)):
        value = builder.call("mm", value, weight)
        value = builder.call("tanh", value)
    builder.call("neg", value, keep="result")


def ranged(memory: int) -> tuple[Builder, TaskGraph, dict[int, OpRecord], MemGraph]:
    first = build(products)
    graph, records = measured(first)
    vertices = tuple(replace(v, duration=1e-6 if v.kind is VertexKind.KERNEL else None) for v in graph.vertices)
    graph = replace(graph, vertices=vertices)
    sized = with_memory(graph, lambda device: memory)
    plan = build_timed(sized, Machine(links={TO_DEVICE: _LINK, TO_HOST: _LINK}), cyclic=True, settings=_SETTINGS)
    verify(sized, plan)
    return first, graph, records, plan


@pytest.mark.parametrize("memory", [12_288, 14_336, 16_384])
def test_bits_are_those_of_eager(memory: int) -> None:
    first, graph, records, plan = ranged(memory)
    held = ranged_values(plan)
    assert any(swaps_in(v) and (v.id, 0) in held for v in plan.vertices), memory
    assert any(map(is_resident_range, plan.vertices)), memory
    for seed in range(3):
        options = EngineOptions(dispatch="random", seed=seed)
        with Executor(plan, graph.ops, records, clean=first.clean, options=options) as executor:
            for data in range(3):
                inputs = build(products, data)
                assert_bits(step(executor, inputs), inputs)
            for arena in executor._memory.devices.values():
                arena.fill_(255)
            executor.invalidate()
            inputs = build(products, 7)
            assert_bits(step(executor, inputs), inputs)


def test_the_engine_refuses_ranges_that_are_not_in_a_row() -> None:
    first, graph, records, plan = ranged(14_336)
    further = next(v for v in plan.vertices if v.begin and any((v.id, 0) in u.inputs for u in plan.vertices))
    for bad, message in (
        (replace(further, begin=further.begin + 256), "do not lie in a row|which has fewer"),
        (replace(further, begin=-256), "which has fewer|do not lie in a row|bytes of"),
    ):
        vertices = tuple(bad if v is further else v for v in plan.vertices)
        with pytest.raises(ExecutionError, match=message):
            Executor(replace(plan, vertices=vertices), graph.ops, records, clean=first.clean)
