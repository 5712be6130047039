"""Stage ``lookahead``: a chain of products through the engine, with K kernels queued ahead, for many sizes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.stage import Run
from disco_accel.execute.executor import EngineOptions, Executor
from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import OpCall, OpResult, TaskGraph, TensorArg, TensorSpec, Vertex, VertexKind
from disco_accel.graph.traits import FOREIGN, FROZEN
from disco_accel.measure.costs import Measured
from disco_accel.measure.record import measurements
from disco_accel.native.cuda_backend import median_seconds
from disco_accel.native.host_memory import bytes_of
from disco_accel.plan import make_plan

_KS = (0, 1, 2, 4, 8)
_STEPS = 7


def chain(length: int, size: int) -> TaskGraph:
    """``x @ w @ w ...``: INPUT 0 is external (x), INPUT 1 clean (w), square bf16 matrices; the last product is kept."""
    spec = TensorSpec("bfloat16", (size, size), (size, 1))
    nbytes = 2 * size * size
    vertices = [
        Vertex(0, VertexKind.INPUT, 0, sizes=(nbytes,), traits=FOREIGN),
        Vertex(1, VertexKind.INPUT, 0, sizes=(nbytes,), traits=FROZEN),
    ]
    call = OpCall("aten::mm", "default", (TensorArg(0, spec), TensorArg(1, spec)), (OpResult(0, spec),), "chain")
    for i in range(2, 2 + length):
        before = (0, 0) if i == 2 else (i - 1, 0)
        last = i == 1 + length
        vertices.append(Vertex(i, VertexKind.KERNEL, 0, "mm", inputs=(before, (1, 0)), sizes=(nbytes,), keep=last))
    total = nbytes * (length + 2)
    return TaskGraph("chain", (Space(0, total),), tuple(vertices), {i: call for i in range(2, 2 + length)})


def measure(run: Run) -> dict[str, Any]:
    """For each size: microseconds of one kernel in PyTorch's own chain, and that over the engine's for each K."""
    where = run.where
    length, sizes = (20, (16, 64)) if run.small else (200, (256, 1024, 2048, 3072, 4096))
    figures: dict[str, Any] = {"k": list(_KS)}
    for size in sizes:
        graph = chain(length, size)
        x, w = (torch.randn(size, size, dtype=torch.bfloat16) * size**-0.5 for _ in range(2))
        x, there = x.to(where), w.to(where)

        def eager(x: torch.Tensor = x, w: torch.Tensor = there) -> torch.Tensor:
            for _ in range(length):
                x = x @ w
            return x

        costs = Measured(run.device).of(graph)
        costed = measurements(costs.records).run(graph)
        plan, records = make_plan(costed, memory=1 << 30, policy="belady", cyclic=True), costs.records
        alone = _eager_seconds(eager, where)
        ratios = []
        for k in _KS:
            with Executor(
                plan, graph.ops, records, clean={1: bytes_of(w)}, options=EngineOptions(device=run.device, lookahead=k)
            ) as executor:
                ratios.append(alone / _engine_seconds(executor, x))
                got = executor.value((1 + length, 0), graph.ops[2].results[0].spec)  # type: ignore[union-attr]
                if not torch.equal(got, eager()):
                    figures["wrong"] = f"size {size}, K {k}: the chain's result is not PyTorch's"
        figures[f"mm_{size}_us"] = alone / length * 1e6
        figures[f"mm_{size}_of_eager_speed"] = ratios
        run.keep(figures)
    return figures


def _eager_seconds(run: Callable[[], object], where: torch.device) -> float:
    run()
    if where.type == "cuda":
        return median_seconds(run, where)
    samples = []
    for _ in range(_STEPS):
        began = time.perf_counter()
        run()
        samples.append(time.perf_counter() - began)
    return statistics.median(samples)


def _engine_seconds(executor: Executor, x: torch.Tensor) -> float:
    samples = []
    for _ in range(_STEPS + 2):
        executor.begin({0: x})
        executor.wait_end()
        samples.append(float(executor.counters()["step_seconds"]))
    return statistics.median(samples[2:])
