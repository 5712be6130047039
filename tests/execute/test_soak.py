"""Long runs: the same bits in every schedule, and memory that does not grow.

``DISCO_SOAK_STEPS=1000 python -m pytest -s tests/execute/test_soak.py`` is the long version.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from disco_accel.capture.fake_inputs import batch_tensors
from disco_accel.errors import BudgetTooSmall
from disco_accel.execute.executor import EngineOptions, Executor, arena_bytes
from disco_accel.integrate.hf.tracing import hf_contexts
from disco_accel.native.arena import device_arena
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.compile.conductor import CompileOptions, compile_step
from disco_accel.step.compile.fitted_batch import FittedBatch
from tests.support.models import random_batch, tiny_lora

STEPS = int(os.environ.get("DISCO_SOAK_STEPS", "100"))
PER_EXECUTOR = 4
"""Steps that one executor runs before another takes over, with a seed of its own."""
_BATCHES = 4
Values = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.set_num_threads(1)
    return tiny_lora(layers=2, hidden=32, vocabulary=64, checkpointing=True)


def _compiled(model: torch.nn.Module, memory: int) -> CompiledStep:
    batch = random_batch(64)
    options = CompileOptions(
        memory=memory,
        host_memory=1 << 30,
        planner="build",
        policy="belady",
        engine=EngineOptions(),
        contexts=hf_contexts(model, batch),
    )
    return compile_step(model, FittedBatch(batch), forward=model.forward, options=options)


@pytest.fixture(scope="module")
def least(model: torch.nn.Module) -> int:
    """The smallest whole budget that works."""
    with pytest.raises(BudgetTooSmall) as caught:
        _compiled(model, 4096)
    return caught.value.needed


def _eager(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Values:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    values = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {**values, "loss": loss.detach()}


def _run(executor: Executor, step: CompiledStep, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Values:
    tensors = {"trainable": dict(model.named_parameters()), "batch": batch_tensors(batch)}
    executor.begin({b.vertex: tensors[b.source][b.name].detach() for b in step.externals})
    executor.wait_out()
    executor.deliver({b.vertex: torch.ones(()) for b in step.vertices_of("tangent")})
    executor.wait_end()
    return {b.name: executor.value(b.ref, b.spec) for b in (*step.captured.outputs, *step.captured.gradients)}


def _resident_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def test_random_schedules_give_eager_bits_and_memory_stays_flat(model: torch.nn.Module, least: int) -> None:
    """A LoRA step at the least budget, random dispatch, a new seed for every executor: equal every time, RSS flat."""
    batches = [random_batch(64, seed=s) for s in range(_BATCHES)]
    expected = [_eager(model, batch) for batch in batches]
    step = _compiled(model, least)
    arena = device_arena(arena_bytes(step.plan), torch.device("cpu"))
    warm, resident = max(STEPS // 5, PER_EXECUTOR), {}
    for seed in range(STEPS // PER_EXECUTOR):
        options = EngineOptions(
            dispatch="random", seed=seed, compute_streams=1 + seed % 2, lookahead=seed % 4, link_bandwidth=2e9
        )
        with step.make_executor(options, arenas={step.plan.devices[0].id: arena}) as executor:
            for i in range(PER_EXECUTOR):
                got = _run(executor, step, model, batches[i % _BATCHES])
                assert got.keys() == expected[i % _BATCHES].keys()
                for name, value in expected[i % _BATCHES].items():
                    assert torch.equal(got[name], value), (seed, i, name)
            reloaded = executor.counters()["reload_bytes"]
        del executor, got
        if PER_EXECUTOR * (seed + 1) in (warm, STEPS):
            gc.collect()
            resident[PER_EXECUTOR * (seed + 1)] = _resident_kib()
    assert reloaded > 0
    print(f"steps: {STEPS}; RSS in KiB by step: {resident}")
    assert resident[STEPS] - resident[warm] < 2048


def test_one_executor_for_long(model: torch.nn.Module, least: int) -> None:
    """The same executor, step after step: every step draws another order, gives the same bits, and adds no memory."""
    batches = [random_batch(64, seed=s) for s in range(_BATCHES)]
    expected = [_eager(model, batch) for batch in batches]
    step = _compiled(model, int(least * 1.2))
    resident = {}
    options = EngineOptions(dispatch="random", seed=11, compute_streams=2, link_bandwidth=2e9)
    with step.make_executor(options) as executor:
        for i in range(STEPS):
            got = _run(executor, step, model, batches[i % _BATCHES])
            for name, value in expected[i % _BATCHES].items():
                assert torch.equal(got[name], value), (i, name)
            if i + 1 in (max(STEPS // 5, 1), STEPS):
                resident[i + 1] = _resident_kib()
        assert executor.counters()["steps"] == STEPS
    print(f"steps: {STEPS}; RSS in KiB by step: {resident}")
    assert resident[STEPS] - resident[max(STEPS // 5, 1)] < 2048
