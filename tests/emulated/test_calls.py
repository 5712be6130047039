"""How often a planned step calls the runtime beside launching its kernels and copies: each call takes microseconds."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch

from benchmarks.gpu.models import SMALL, arena_llama, batch_for, with_adapter
from disco_accel import DiscoConfig, prepare, stats
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import VertexKind
from tests.emulated import device
from tests.emulated.models import CUDA, assert_same, least, step
from tests.emulated.test_engine import state_of

_KERNEL_SECONDS = 1e-5
"""As the plan has it, whatever a kernel takes here: a usual time on a GPU."""
_CALLS = ("cudaEventRecord", "cudaStreamWaitEvent", "cudaEventQuery", "cudaMemcpyAsync", "cudaMemcpyBatchAsync")
_BATCHES = int(os.environ.get("EMULATED_CUDART") or 13000) >= 12080
"""Whether the runtime takes several copies in one call."""


def usual(plan: MemGraph) -> MemGraph:
    vertices = (
        dataclasses.replace(v, duration=_KERNEL_SECONDS) if v.kind is VertexKind.KERNEL else v for v in plan.vertices
    )
    return dataclasses.replace(plan, vertices=tuple(vertices))


def leaving(plan: MemGraph) -> int:
    """Kernels that a copy waits for."""
    kind = {vertex.id: vertex.kind for vertex in plan.vertices}
    edges = {*plan.data_edges, *plan.memory_edges, *((u, v.id) for v in plan.vertices for u, _ in v.inputs)}
    return len({u for u, v in edges if kind[u] is VertexKind.KERNEL and kind[v] is VertexKind.COPY})


def counted(run: Any) -> dict[str, int]:
    torch.cuda.synchronize()
    before = device.counts()
    run()
    torch.cuda.synchronize()
    return {name: number - before.get(name, 0) for name, number in device.counts().items()}


def lora_step(budget: str | None = None, **options: Any) -> tuple[Any, Any, MemGraph, dict[str, torch.Tensor]]:
    """A LoRA model, its batch, its plan with usual times, run by an engine with ``options``, and the results of a step.
    ``budget``: the least if none is given."""
    base, _ = arena_llama(SMALL, dtype=torch.float32, attention="eager", source=CUDA)
    batch = batch_for(SMALL["vocab_size"], 2, 16, CUDA)
    model = with_adapter(base, rank=4, checkpointing=True)
    if budget is None:
        least(model, lambda m: step(m, batch))
    else:
        prepare(model, DiscoConfig(memory_budget=budget, device="cuda"))
    expected = step(model, batch)
    expected.pop("generator")
    current, memory = state_of(model).memory.current, state_of(model).memory
    assert current is not None
    plan = usual(current.plan)
    before = current.use(
        current.make_executor(dataclasses.replace(current.engine, **options), arenas=memory.arenas, plan=plan)
    )
    assert before is not None
    before.close()
    current.executor.invalidate()
    return model, batch, plan, expected


def steady_calls(model: Any, batch: Any, expected: dict[str, torch.Tensor], warm: int = 1) -> dict[str, int]:
    """Calls of a step after ``warm`` others; each of them has the expected bits."""
    got: dict[str, torch.Tensor] = {}
    for _ in range(warm + 1):
        calls = counted(lambda: got.update(step(model, batch)))
        got.pop("generator")
        assert_same(got, expected)
    return calls


def kernels_of(plan: MemGraph) -> int:
    return sum(vertex.kind is VertexKind.KERNEL for vertex in plan.vertices)


def copies_of(calls: dict[str, int]) -> int:
    return sum(calls.get(f"copy {way}", 0) for way in ("h2d", "d2h"))


def copy_calls(calls: dict[str, int]) -> int:
    return sum(calls.get(f"cudaMemcpy{kind}Async", 0) for kind in ("", "Batch"))


@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_kernel_costs_little_beside_its_launch(lookahead: int) -> None:
    """A LoRA step in the least memory. On one device the engine neither asks which is current nor sets it."""
    model, batch, plan, expected = lora_step(lookahead=lookahead, launch_graphs=False)
    calls = steady_calls(model, batch, expected)
    kernels = kernels_of(plan)
    copies = copies_of(calls)
    told = f"{kernels} kernels, {copies} copies, {leaving(plan)} kernels before one, K = {lookahead}: " + ", ".join(
        f"{calls.get(name, 0)} {name}" for name in _CALLS
    )
    print(told)
    # At most one event for each call that copies.
    records = calls["cudaEventRecord"] - copy_calls(calls)
    # Where a copy waits for a kernel it does not wait for those that are queued behind it.
    assert records >= leaving(plan) or not _BATCHES, told
    if lookahead == 0:
        assert records >= kernels or not _BATCHES, told
        return
    # An event for each half of the window in time, one for each kernel that a copy waits for, and some in between.
    assert records + calls.get("cudaStreamWaitEvent", 0) <= 0.6 * kernels, told


@pytest.mark.parametrize(("budget", "share"), [("1GiB", 20), (None, 2)])
def test_kernels_that_follow_each_other_are_launched_as_one(budget: str | None, share: int) -> None:
    """A LoRA step with all of its memory, and in the least, where copies come between: no more calls of kernels and
    graphs than one in ``share`` of its kernels, and the same bits."""
    model, batch, plan, expected = lora_step(budget, launch_graphs=True)
    calls = steady_calls(model, batch, expected, warm=7)
    figures, kernels = stats(model), kernels_of(plan)
    # Beside the plan's, PyTorch launches some kernels of the caller's.
    told = f"{kernels} kernels, {figures['launches']} launches, {figures['launch_graphs']}, " + ", ".join(
        f"{calls.get(name, 0)} {name}" for name in ("kernels", "cudaGraphLaunch", *_CALLS)
    )
    print(told)
    assert figures["launches"] <= kernels / share, told
    assert figures["launch_graphs"]["graphs"] == calls["cudaGraphLaunch"], told
    assert not calls.get("cudaStreamBeginCapture", 0), told


def test_small_copies_that_are_ready_together_go_in_one_call() -> None:
    """A LoRA step in the least memory, whose first reloads are ready when it begins. Fewer calls than copies, or where
    the runtime takes no batches fewer events than these would have; and the same bits."""
    model, batch, plan, expected = lora_step(launch_graphs=False)
    calls = steady_calls(model, batch, expected)
    copies, kernels = copies_of(calls), kernels_of(plan)
    told = f"{kernels} kernels, {copies} copies in {copy_calls(calls)} calls: " + ", ".join(
        f"{calls.get(name, 0)} {name}" for name in _CALLS
    )
    print(told)
    assert calls.get("cudaMemcpyBatchAsync", 0) > 0 or not _BATCHES, told
    assert copy_calls(calls) < copies or not _BATCHES, told
    assert calls["cudaEventRecord"] < kernels + copies, told
