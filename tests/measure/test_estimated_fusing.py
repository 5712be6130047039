"""Fused kernels that are estimated: their seconds are those of what they read and write."""

from __future__ import annotations

import pytest

from disco_accel.capture.step import capture_step
from disco_accel.graph.taskgraph import TaskGraph, is_fused
from disco_accel.measure import fused_kernels
from disco_accel.measure.estimated_fusing import _EstimatedFusing
from disco_accel.native.backend import backend_of_kind
from disco_accel.simulate.roofline import fused_estimate, with_estimates
from tests.support.fused_calls import EXPANDED, WIDE, routed, scaled
from tests.support.models import random_batch, tiny_lora

SPEED = backend_of_kind("cuda").speed


def step() -> TaskGraph:
    model = tiny_lora()
    return with_estimates(capture_step(model, random_batch(), forward=model.forward).graph, SPEED)


def test_each_input_is_read_once_and_each_result_written() -> None:
    """An element that lies in memory once is read once."""
    elements = WIDE.shape[0] * WIDE.shape[1]
    assert fused_estimate(scaled(2.0), SPEED) == SPEED.kernel + (3 * 4 + 2) * elements / SPEED.memory
    once = 2 * 4 * elements + 4 * EXPANDED.shape[0]
    assert fused_estimate(routed(), SPEED) == SPEED.kernel + once / SPEED.memory


def test_a_step_has_all_runs_that_take_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled; records are those of the fused kernels."""
    monkeypatch.setattr(fused_kernels, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr("disco_accel.fuse.compiler_process._CompilerProcess", lambda *_: pytest.fail("compiles"))
    graph, fusing = step(), _EstimatedFusing(SPEED)
    joined = fusing.fused(graph)
    seconds = [sum(v.duration or 0.0 for v in each.vertices) for each in (graph, joined)]
    assert len(joined.ops) < len(graph.ops) and seconds[1] < seconds[0]
    assert fusing.records(joined).keys() == {v for v, call in joined.ops.items() if is_fused(call)} != set()
    assert not fusing.records(graph)


def test_a_step_with_little_to_join_is_left_alone() -> None:
    graph = step()
    assert _EstimatedFusing(SPEED).fused(graph) is graph
