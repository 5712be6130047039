"""A plan file with one bit flipped is refused, or runs and gives eager's bits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from disco_accel.errors import BudgetTooSmall
from disco_accel.execute.executor import EngineOptions, Executor
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.taskgraph import TaskGraph, with_memory
from disco_accel.plan import make_plan
from disco_accel.plan import plan_cache as module
from disco_accel.plan.plan_cache import PlanCache
from tests.execute.programs import Builder, assert_bits, build, measured, step

KEY = "5" * 64
FLIPS = 800


def deep(builder: Builder, rng: torch.Generator) -> None:
    """Five products, all of which are read again in reverse: too many to stay on the device."""
    weights = [builder.weight(torch.randn(8, 8, generator=torch.Generator().manual_seed(i))) for i in range(3)]
    value = builder.input(torch.randn(8, 8, generator=rng))
    stack = []
    for turn in range(5):
        value = builder.call("mm", value, weights[turn % 3])
        stack.append(value)
    for earlier in reversed(stack[:-1]):
        value = builder.call("mul.Tensor", value, earlier)
    builder.call("tanh", value, keep="result")


def _least(graph: TaskGraph) -> int:
    try:
        make_plan(graph, memory=256, cyclic=True)
    except BudgetTooSmall as error:
        return error.needed
    return 256


def test_one_flipped_bit_is_refused_or_changes_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(deep)
    graph, records = measured(first)
    sized = with_memory(graph, lambda device: _least(graph))
    plan = make_plan(sized, cyclic=True)
    assert any(map(swaps_out, plan.vertices)) and any(map(swaps_in, plan.vertices))
    monkeypatch.setattr(module, "_say", lambda path, reason: None)
    cache = PlanCache(tmp_path)
    cache.store(KEY, plan)
    file = tmp_path / "plans" / f"{KEY}.json"
    whole = file.read_bytes()
    ran = set()
    for bit in random.Random(3).sample(range(8 * len(whole)), FLIPS):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        got = cache.load(KEY, sized, cyclic=True)
        if got is None or repr(got) in ran:
            continue
        ran.add(repr(got))
        options = EngineOptions(dispatch="random", seed=bit)
        with Executor(got, graph.ops, records, clean=first.clean, options=options) as executor:
            for data in range(2):
                inputs = build(deep, data)
                assert_bits(step(executor, inputs), inputs)
    assert len(ran) > 3
