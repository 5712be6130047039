"""The engine gives eager's bits, whatever the schedule, the budget and the step."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from disco_accel.errors import BudgetTooSmall, ConfigError, ExecutionError
from disco_accel.execute.executor import EngineOptions, Executor
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import OpCall, TaskGraph, VertexKind
from disco_accel.measure.record import OpRecord, apply, record
from disco_accel.plan import make_plan
from tests.execute import samples
from tests.execute.programs import (
    Builder,
    Program,
    assert_bits,
    build,
    bump_plan,
    executor_of,
    measured,
    step,
    step_in_two,
)
from tests.support.interrupts import interrupt_when_waiting

SCHEDULES = [
    EngineOptions(),
    EngineOptions(lookahead=0),
    EngineOptions(dispatch="random", seed=1),
    EngineOptions(dispatch="random", seed=2, compute_streams=2, lookahead=4),
    EngineOptions(dispatch="fixed"),
    EngineOptions(dispatch="synchronous"),
    EngineOptions(compute_streams=2, lookahead=1),
    EngineOptions(link_bandwidth=200e6, link_latency=1e-5),
]
NAMES = ["default", "k0", "random1", "random2-streams", "fixed", "synchronous", "two-streams", "throttled"]


@cache
def _measured(program: Program) -> tuple[Builder, TaskGraph, dict[int, OpRecord]]:
    builder = build(program)
    return builder, *measured(builder)


def _smallest(graph: TaskGraph) -> int:
    with pytest.raises(BudgetTooSmall) as caught:
        make_plan(graph, memory=256, cyclic=True)
    return caught.value.needed


@cache
def _plan(program: Program, budget: str) -> MemGraph:
    _, graph, _ = _measured(program)
    if budget == "bump":
        return bump_plan(graph)
    needed = _smallest(graph)
    memory = {"least": needed, "more": needed * 3 // 2 // 256 * 256, "all": 1 << 24}[budget]
    return make_plan(graph, memory=memory, cyclic=True)


def _executor(program: Program, budget: str, options: EngineOptions | None = None) -> Executor:
    builder, graph, records = _measured(program)
    plan = _plan(program, budget)
    return Executor(plan, graph.ops, records, clean=builder.clean, options=options or EngineOptions())


@pytest.mark.parametrize("options", SCHEDULES, ids=NAMES)
@pytest.mark.parametrize("budget", ["bump", "least", "more", "all"])
@pytest.mark.parametrize("program", samples.ALL, ids=lambda p: p.__name__)
def test_bits_equal_eager_over_steps(program: Program, budget: str, options: EngineOptions) -> None:
    """Three steps with other inputs and other pointers each, on one executor, give eager's bits."""
    with _executor(program, budget, options) as executor:
        for seed in range(3):
            inputs = build(program, seed)
            assert_bits(step(executor, inputs), inputs)


@pytest.mark.parametrize("program", [samples.dense, samples.language_model], ids=lambda p: p.__name__)
def test_small_budgets_really_offload_and_reload(program: Program) -> None:
    """At the least budget values travel both ways, and the counters report the plan's bytes."""
    plan = _plan(program, "least")
    with _executor(program, "least") as executor:
        step(executor, build(program))
        step(executor, build(program))
        counters = executor.counters()
    reloads = sum(v.sizes[0] for v in plan.vertices if swaps_in(v))
    offloads = sum(v.sizes[0] for v in plan.vertices if swaps_out(v))
    assert reloads > 0 and offloads > 0
    assert (counters["reload_bytes"], counters["offload_bytes"]) == (reloads, offloads)
    assert counters["touched_bytes"] <= counters["arena_bytes"] <= plan.devices[0].memory


@pytest.mark.parametrize("program", samples.ALL, ids=lambda p: p.__name__)
def test_a_step_allocates_nothing_through_pytorch(program: Program) -> None:
    """Allocations are served from the plan; none reaches PyTorch's allocator on the engine's threads."""
    with _executor(program, "more") as executor:
        for seed in range(2):
            step(executor, build(program, seed))
            assert executor.counters()["c10_allocations"] == 0
        assert executor.counters()["planned_allocations"] > 0


class _Counting(TorchDispatchMode):
    """Counts the ops that reach it."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", SCHEDULES, ids=NAMES)
@pytest.mark.parametrize("program", samples.ALL, ids=lambda p: p.__name__)
def test_a_caller_that_runs_kernels_itself_gets_the_same_bits(program: Program, options: EngineOptions) -> None:
    """Begin and wait in one call, which lets the calling thread work, changes nothing and allocates nothing."""
    with _executor(program, "more", options) as executor:
        for seed in range(3):
            inputs = build(program, seed)
            assert_bits(step_in_two(executor, inputs), inputs)
            assert executor.counters()["c10_allocations"] == 0


def test_what_the_caller_has_set_does_not_reach_the_kernels() -> None:
    """Autocast, inference mode and a dispatch mode around a step change no bit, and are in place afterwards."""
    inputs = build(samples.language_model)
    with _executor(samples.language_model, "more") as executor:
        assert_bits(step_in_two(executor, inputs), inputs)
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), _Counting() as mode:
            got = step_in_two(executor, inputs)
            before = mode.count
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
            assert mode.count > before, "the mode is still in place"
        assert_bits(got, inputs)
        assert executor.counters()["c10_allocations"] == 0


def test_a_caller_with_another_thread_count_leaves_the_kernels_to_the_engine() -> None:
    """Kernels always run with the number of threads that they were recorded with."""
    before = torch.get_num_threads()
    inputs = build(samples.language_model)
    with _executor(samples.language_model, "more", EngineOptions(compute_threads=before)) as executor:
        torch.set_num_threads(before + 1)
        try:
            got = step_in_two(executor, inputs)
        finally:
            torch.set_num_threads(before)
        assert_bits(got, inputs)


def test_the_gate_holds_back_what_needs_the_tangent() -> None:
    """After wait_out the loss is there; the backward runs only once the tangent is delivered, with its value."""
    with _executor(samples.dense, "more") as executor:
        first = build(samples.dense, 0)
        executor.begin(first.external)
        executor.wait_out()
        value = first.results["loss"]
        assert torch.equal(executor.value(value.ref, value.spec), value.tensor)
        with pytest.raises(ExecutionError, match="deliver"):
            executor.wait_end()
        executor.deliver(first.late)
        executor.wait_end()
        got = {n: executor.value(v.ref, v.spec).clone() for n, v in first.results.items()}
    assert_bits(got, first)


def test_an_abandoned_step_leaves_no_trace() -> None:
    """A step dropped at the gate, or right after begin, does not disturb the next one."""
    with _executor(samples.dense, "least") as executor:
        for _ in range(3):
            executor.begin(build(samples.dense, 5).external)
            executor.wait_out()
            executor.abandon()
            executor.begin(build(samples.dense, 6).external)
            executor.abandon()
            inputs = build(samples.dense, 1)
            assert_bits(step(executor, inputs), inputs)


def test_changed_weights_arrive_after_invalidate() -> None:
    """Resident copies are refreshed from the host by invalidate(), and not before."""

    def program(b: Builder, g: torch.Generator) -> None:
        x = b.input(torch.randn(4, 8, generator=g))
        b.call("mm", x, weight_of(b), keep="y")

    held = torch.randn(8, 8)

    def weight_of(b: Builder) -> object:
        return b.weight(held)

    builder = build(program)
    with executor_of(builder) as executor:
        before = step(executor, builder)
        held.mul_(2)
        assert torch.equal(step(executor, builder)["y"], before["y"])
        executor.invalidate()
        assert_bits(step(executor, builder), build(program))


def test_two_executors_take_turns_and_share_an_arena() -> None:
    """Executors do not see each other; on one shared arena an invalidate() makes the switch safe."""
    one, two = _executor(samples.dense, "all"), _executor(samples.language_model, "least")
    for seed in range(2):
        for executor, program in ((one, samples.dense), (two, samples.language_model)):
            inputs = build(program, seed)
            assert_bits(step(executor, inputs), inputs)
    builder, graph, records = _measured(samples.language_model)
    shared = one._memory.devices[0]
    plan = _plan(samples.language_model, "all")
    third = Executor(plan, graph.ops, records, clean=builder.clean, arena=shared)
    for executor, program in ((third, samples.language_model), (one, samples.dense), (third, samples.language_model)):
        executor.invalidate()
        inputs = build(program, 3)
        assert_bits(step(executor, inputs), inputs)
    for executor in (one, two, third):
        executor.close()


_FOR_EVER = EngineOptions(link_latency=3600.0)


def test_a_wait_lets_other_python_threads_run() -> None:
    """Waiting holds no GIL: another thread makes progress while a step waits, and it is that thread that ends it."""
    with _executor(samples.dense, "least", _FOR_EVER) as executor:
        executor.begin(build(samples.dense).external)
        ticks = 0

        def count() -> None:
            nonlocal ticks
            while ticks < 100:
                time.sleep(0.001)
                ticks += 1
            executor._engine.abort(60.0)

        thread = threading.Thread(target=count)
        thread.start()
        executor._engine.wait_out(3600.0)
        assert ticks == 100
        thread.join()


def test_ctrl_c_ends_a_step_and_the_next_one_works() -> None:
    """KeyboardInterrupt surfaces from the wait for a step that would not end by itself."""
    with _executor(samples.dense, "least", _FOR_EVER) as executor:
        executor.begin(build(samples.dense).external)
        with pytest.raises(KeyboardInterrupt), interrupt_when_waiting():
            executor.wait_out()
    with _executor(samples.dense, "least") as executor:
        inputs = build(samples.dense)
        assert_bits(step(executor, inputs), inputs)


def _indexing_error(b: Builder, g: torch.Generator) -> None:
    table = b.weight(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    rows = b.input(torch.randint(0, 4, (5,), generator=g))
    picked = b.call("index_select", table, 0, rows, module="model.embed", keep="picked")
    b.call("mul.Tensor", picked, 2.0, keep="doubled")


@pytest.mark.parametrize("streams", [1, 2])
def test_a_failing_op_names_vertex_and_module_and_the_next_step_works(streams: int) -> None:
    """An index out of range raises ExecutionError with op, module and vertex; the following step is right."""
    with executor_of(build(_indexing_error), options=EngineOptions(compute_streams=streams)) as executor:
        bad = build(_indexing_error)
        rows = next(iter(bad.external))
        with pytest.raises(
            ExecutionError, match=r"vertex 2 failed: aten::index_select in model\.embed: .*out of range"
        ):
            step(executor, replace_external(bad, rows, torch.full((5,), 99)))
        inputs = build(_indexing_error, 1)
        assert_bits(step(executor, inputs), inputs)


def replace_external(builder: Builder, vertex: int, tensor: torch.Tensor) -> Builder:
    return replace(builder, external={**builder.external, vertex: tensor})


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), "external input 1 covers 24 bytes where the plan has 40"),
        (torch.zeros(5, dtype=torch.int64, device="meta"), "external input 1 is on meta, the plan runs on cpu"),
    ],
)
def test_a_wrong_external_tensor_is_named(tensor: torch.Tensor, message: str) -> None:
    """Another size or device than planned is an error before anything runs."""
    builder = build(_indexing_error)
    with executor_of(builder) as executor:
        with pytest.raises(ExecutionError, match=message):
            step(executor, replace_external(builder, 1, tensor))
        with pytest.raises(ExecutionError, match="no tensor was given for external input 1"):
            executor.begin({})
        assert_bits(step(executor, builder), builder)


def test_calls_out_of_turn_are_errors() -> None:
    """begin twice, wait without begin, deliver twice: each says what to do."""
    inputs = build(samples.dense)
    with _executor(samples.dense, "all") as executor:
        with pytest.raises(ExecutionError, match="begin"):
            executor.wait_out()
        executor.begin(inputs.external)
        with pytest.raises(ExecutionError, match="abandon"):
            executor.begin(inputs.external)
        executor.wait_out()
        executor.deliver(inputs.late)
        with pytest.raises(ExecutionError, match="delivered already"):
            executor.deliver(inputs.late)
        executor.wait_end()


def test_plans_that_lack_something_are_refused() -> None:
    """A missing call, host copy, address or edge target names its vertex."""
    builder, graph, records = _measured(samples.dense)
    plan = _plan(samples.dense, "all")
    kernel = next(v for v in graph.vertices if v.kind is VertexKind.KERNEL)
    weight = next(iter(builder.clean))
    without: dict[int, OpCall] = {k: c for k, c in graph.ops.items() if k != kernel.id}
    with pytest.raises(ExecutionError, match=f"kernel {kernel.id} .* has no call"):
        Executor(plan, without, records, clean=builder.clean)
    with pytest.raises(ExecutionError, match=f"clean input {weight} needs .* no host bytes"):
        Executor(plan, graph.ops, records, clean={k: t for k, t in builder.clean.items() if k != weight})
    slots = {ref: slot for ref, slot in plan.slots.items() if ref[0] != kernel.id}
    with pytest.raises(ExecutionError, match=f"vertex {kernel.id} has no address"):
        Executor(replace(plan, slots=slots), graph.ops, records, clean=builder.clean)
    with pytest.raises(ExecutionError, match="bytes, the plan needs"):
        Executor(plan, graph.ops, records, clean=builder.clean, arena=torch.empty(64, dtype=torch.uint8))


@pytest.mark.parametrize(
    "options",
    [
        EngineOptions(dispatch="eager"),
        EngineOptions(lookahead=-1),
        EngineOptions(link_bandwidth=0.0),
        EngineOptions(compute_threads=0),
    ],
)
def test_bad_options_are_config_errors(options: EngineOptions) -> None:
    """Each names the option."""
    name = next(k for k in ("dispatch", "lookahead", "link_bandwidth", "compute_threads") if _differs(options, k))
    with pytest.raises(ConfigError, match=name):
        _executor(samples.in_place, "bump", options)


def _differs(options: EngineOptions, key: str) -> bool:
    return bool(getattr(options, key) != getattr(EngineOptions(), key))


def test_compute_threads_are_the_engines_own() -> None:
    """A full sum over many elements splits by thread count: the engine gives the bits of eager at its own count."""

    def program(b: Builder, g: torch.Generator) -> None:
        x = b.input(torch.randn(1 << 18, generator=g))
        b.call("sum", x, keep="total")
        b.call("silu", x, keep="activated")

    before = torch.get_num_threads()
    try:
        for threads in (2, 1):
            torch.set_num_threads(threads)
            expected = build(program)
            graph = expected.graph()
            records = record(graph, compute_threads=threads)
            graph = apply(graph, records)
            torch.set_num_threads(3 - threads)
            options = EngineOptions(compute_threads=threads)
            with Executor(bump_plan(graph), graph.ops, records, clean={}, options=options) as executor:
                assert_bits(step(executor, expected), expected)
            assert torch.get_num_threads() == 3 - threads
    finally:
        torch.set_num_threads(before)


def test_events_cover_the_step_and_respect_the_plan() -> None:
    """Traced: every kernel and copy once, start <= end, lanes do not overlap, predecessors end first."""
    plan = _plan(samples.dense, "least")
    with _executor(samples.dense, "least", EngineOptions(link_bandwidth=100e6)) as executor:
        step(executor, build(samples.dense))
        assert executor.events() == []
        executor.set_tracing(True)
        step(executor, build(samples.dense))
        events = executor.events()
        counters = executor.counters()
    ran = {v.id for v in plan.vertices if v.kind is not VertexKind.INPUT}
    assert sorted(e.vertex for e in events) == sorted(ran)
    assert {e.lane for e in events} == {"compute0", "h2d", "d2h"}
    by_id = {e.vertex: e for e in events}
    for lane in ("compute0", "h2d", "d2h"):
        spans = sorted((e.start, e.end) for e in events if e.lane == lane)
        assert all(start <= end for start, end in spans)
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(spans))
    for u, v in (*plan.data_edges, *plan.memory_edges):
        if u in by_id and v in by_id:
            assert by_id[u].end <= by_id[v].start + 1e-9
            assert by_id[u].end <= by_id[v].ready + 1e-9
    assert all(0 <= e.ready <= e.start + 1e-9 for e in events)
    assert sum(e.bytes for e in events if e.lane == "h2d") == counters["reload_bytes"]
    assert 0 < counters["op_seconds"] <= counters["step_seconds"]
