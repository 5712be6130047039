"""Memory that runs out while a step is prepared: a typed error, nothing leaks, and the next attempt works."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from disco_accel.errors import DiscoError
from disco_accel.execute.executor import Executor
from disco_accel.measure.record import record
from disco_accel.native.extension import load_extension
from disco_accel.native.host_backend import HostBackend
from tests.execute.programs import Builder, assert_bits, build, bump_plan, measured, step


@pytest.fixture
def live_bytes() -> Iterator[Callable[[], int]]:
    """Bytes that PyTorch's CPU allocator has handed out since the test began."""
    load_extension()
    ops = torch.ops.disco_accel
    ops.set_live_tracking(True)

    def live() -> int:
        gc.collect()
        return int(ops.live_bytes())

    yield live
    ops.set_live_tracking(False)


def _mappings() -> int:
    """Bytes that are mapped into this process without being part of the heap or a file."""
    with open("/proc/self/maps") as maps:
        lines = [line.split() for line in maps]
    spans = [line[0].split("-") for line in lines if len(line) == 5]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


def _failing_at_every_allocation(work: Callable[[], Any], live: Callable[[], int]) -> int:
    """Runs ``work`` with its nth allocation failing, n = 1, 2, ..., until it succeeds; returns how many failed."""
    work()
    for nth in range(1, 10_000):
        # Python maps memory for itself now and then; what leaks does so each time.
        grown = [_failed_at(nth, work, live)]
        while grown[-1] and len(grown) < 3:
            grown.append(_failed_at(nth, work, live))
        if None in grown:
            return nth - 1
        assert 0 in grown, f"allocation {nth} leaves mappings: {grown} bytes"
    raise AssertionError("it never succeeded")


def _failed_at(nth: int, work: Callable[[], Any], live: Callable[[], int]) -> int | None:
    """Runs ``work`` with its nth allocation failing; by how many bytes mappings grew. None: there is no nth."""
    ops = torch.ops.disco_accel
    before, mapped = live(), _mappings()
    ops.fail_allocation(nth)
    try:
        work()
    except DiscoError as error:
        assert "allocate memory" in str(error), error
        message = str(error)
    else:
        assert ops.fail_allocation(0), f"allocation {nth} failed and nobody said so"
        return None
    assert not ops.fail_allocation(0)
    assert live() == before, f"allocation {nth} leaks {live() - before} bytes ({message})"
    return max(0, _mappings() - mapped)


def _small(b: Builder, g: torch.Generator) -> None:
    x = b.input(torch.randn(8, 8, generator=g))
    weight = b.weight(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))
    y = b.call("mm", x, weight, module="layer")
    b.call("_to_copy", b.call("native_layer_norm", y, [8], None, None, 1e-5)[0], dtype=torch.bfloat16, keep="y")


def test_every_allocation_of_recording_may_fail(live_bytes: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """DiscoError, no byte kept; recording again gives what it gave before."""
    # Each op is timed by one run instead of five or fifteen.
    monkeypatch.setattr(HostBackend, "op_seconds", lambda self, ops, op, cold: ops.time(op, 1)[0])
    graph = build(_small).graph()
    before = record(graph)
    assert _failing_at_every_allocation(lambda: record(graph), live_bytes) > 10
    again = record(graph)
    assert {k: (r.native_out, r.allocations) for k, r in again.items()} == {
        k: (r.native_out, r.allocations) for k, r in before.items()
    }


def test_every_allocation_of_an_executor_may_fail(live_bytes: Callable[[], int]) -> None:
    """DiscoError, neither bytes nor arenas kept; the next executor gives eager's bits."""
    builder = build(_small)
    graph, records = measured(builder)
    plan = bump_plan(graph)

    def construct() -> None:
        Executor(plan, graph.ops, records, clean=builder.clean).close()

    assert _failing_at_every_allocation(construct, live_bytes) > 0
    with Executor(plan, graph.ops, records, clean=builder.clean) as executor:
        assert_bits(step(executor, builder), builder)


_LIMITED = """
import resource
from disco_accel.errors import DiscoError
from disco_accel.execute.executor import Executor
from tests.execute import samples
from tests.execute.programs import assert_bits, build, bump_plan, measured, step
from dataclasses import replace

from disco_accel.graph.spaces import HOST, Space, SpaceKind

builder = build(samples.dense)
graph, records = measured(builder)
plan = bump_plan(graph)
Executor(plan, graph.ops, records, clean=builder.clean).close()
with open("/proc/self/statm") as statm:
    mapped = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 30), resource.RLIM_INFINITY))
for host in (False, True):
    huge = replace(plan, spaces=(*plan.devices, Space(HOST, 1 << 34, 1, SpaceKind.HOST))) if host else plan
    if not host:
        ref, slot = max(plan.slots.items(), key=lambda item: item[1].offset)
        huge = replace(plan, slots={**plan.slots, ref: replace(slot, offset=1 << 34)})
    try:
        Executor(huge, graph.ops, records, clean=builder.clean)
    except DiscoError as error:
        print("refused", "ulimit -v leaves" in str(error))
with Executor(plan, graph.ops, records, clean=builder.clean) as executor:
    assert_bits(step(executor, builder), builder)
print("works")
"""


def test_an_arena_that_cannot_be_mapped_is_a_typed_error() -> None:
    """Under a limit of the address space the device's arena and the host's are refused, and a smaller plan runs."""
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED], capture_output=True, text=True, timeout=1500, env={**os.environ}
    )
    assert done.stdout == "refused True\nrefused True\nworks\n", done.stderr[-2000:]
