"""Faults planted in a running engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from disco_accel.execute.executor import Executor
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import VertexKind


def kernels(plan: MemGraph) -> list[int]:
    """KERNEL ids in serial order, which is how the op table numbers their calls."""
    return [v.id for v in plan.vertices if v.kind is VertexKind.KERNEL]


@contextmanager
def failing(executor: Executor, op: int) -> Iterator[None]:
    """Inside, call number ``op`` of the op table fails as if it had thrown. Enter and leave between steps."""
    executor._engine.fail_at(op)
    try:
        yield
    finally:
        executor.abandon()
        executor._engine.fail_at(-1)
