"""Faults in a step: each is a typed error that names its vertex, and the next step is right."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
import torch

from disco_accel.errors import BudgetTooSmall, ExecutionError, Stalled
from disco_accel.execute.early_end import EngineError, failure
from disco_accel.execute.executor import EngineOptions, Executor, HostLink
from disco_accel.execute.vertex_names import Describer
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.graph.values import host_copy_exists
from disco_accel.native.engine_numbers import EngineStatus
from disco_accel.plan import make_plan
from tests.execute import samples
from tests.execute.device_programs import RELOAD, DeviceBuilder, reloading_plan
from tests.execute.programs import Builder, assert_bits, build, bump_plan, executor_of, measured, step
from tests.support.engine_faults import failing, kernels


def _tight(graph: TaskGraph) -> MemGraph:
    with pytest.raises(BudgetTooSmall) as caught:
        make_plan(graph, memory=256, cyclic=True)
    return make_plan(graph, memory=caught.value.needed, cyclic=True)


@pytest.mark.parametrize("options", [EngineOptions(), EngineOptions(compute_streams=2, dispatch="random", seed=3)])
def test_an_op_that_throws_at_every_vertex(options: EngineOptions) -> None:
    """Each kernel in turn: the error names vertex and op, and the following step has eager's bits."""
    builder = build(samples.dense)
    graph, records = measured(builder)
    plan = _tight(graph)
    with Executor(plan, graph.ops, records, clean=builder.clean, options=options) as executor:
        for op, vertex in enumerate(kernels(plan)):
            inputs = build(samples.dense, op)
            name = graph.ops[vertex].name
            with (
                pytest.raises(ExecutionError, match=f"vertex {vertex} failed: {name}.* a test asked for it"),
                failing(executor, op),
            ):
                step(executor, inputs)
            assert_bits(step(executor, inputs), inputs)


_NEVER = HostLink(bandwidth=1.0)


def _product(b: Builder, g: torch.Generator) -> None:
    x = b.input(torch.randn(16, 16, generator=g))
    h = b.call("tanh", x, module="model.first")
    b.call("mm", h, b.weight(torch.eye(16)), module="model.second", keep="y")


@pytest.mark.parametrize("resident", [True, False])
def test_a_copy_that_never_completes_is_named_with_who_waits(resident: bool) -> None:
    """A weight that never arrives: Stalled names the copy's tensor and the kernel; nothing hangs afterwards."""
    builder = build(_product)
    graph, records = measured(builder)
    plan = bump_plan(graph) if resident else reloading_plan(graph)
    weight = next(v.id for v in graph.vertices if host_copy_exists(v))
    options = EngineOptions(links=(_NEVER,), stall_timeout=0.3)
    executor = Executor(plan, graph.ops, records, clean=builder.clean, options=options, names={weight: "second.weight"})
    for _ in range(2):
        with pytest.raises(Stalled) as caught:
            step(executor, builder)
        copy = (
            f"vertex {weight} (input second.weight)"
            if resident
            else f"vertex {RELOAD + weight} (reload of second.weight)"
        )
        product = f"vertex {graph.vertices[-1].id} (aten::mm in model.second)"
        assert f"in flight 1: {copy}" in str(caught.value)
        assert product in str(caught.value)
        if not resident:
            assert f"{product} for {copy}" in str(caught.value)
    executor.close()
    with Executor(plan, graph.ops, records, clean=builder.clean) as healthy:
        assert_bits(step(healthy, builder), builder)


def test_a_stalled_transfer_names_the_value_and_its_maker() -> None:
    """A value that never crosses to the other device: the message says which, who made it and who waits."""
    b = DeviceBuilder()
    x = b.input(torch.randn(8, 8))
    b.at = 1
    made = b.call("tanh", b.input(torch.randn(8, 8)), module="model.far")
    b.at = 0
    moved = b.transfer(made, 0)
    b.call("add.Tensor", x, moved, module="model.near", keep="y")
    graph, records = measured(b)
    plan = bump_plan(graph)
    slots = {r: replace(s, space=graph.vertices[r[0]].space) for r, s in plan.slots.items()}
    plan = replace(plan, slots=slots, spaces=tuple(replace(d, memory=1 << 20) for d in graph.devices))
    options = EngineOptions(links=(HostLink(), _NEVER), stall_timeout=2.0)
    maker, copy, reader = made.ref[0], moved.ref[0], graph.vertices[-1].id
    with (
        Executor(plan, graph.ops, records, clean={}, options=options) as executor,
        pytest.raises(Stalled) as caught,
    ):
        step(executor, b)
    flight = f"vertex {copy} (transfer of vertex {maker} (aten::tanh in model.far))"
    assert f"in flight 1: {flight}" in str(caught.value)
    assert f"vertex {reader} (aten::add.Tensor in model.near) for {flight}" in str(caught.value)


@pytest.mark.parametrize("running", [False, True])
def test_a_forked_child_gets_an_error_and_the_parent_goes_on(running: bool) -> None:
    """Every use in the child is a typed error, closing works there, and the parent's step is not disturbed."""
    builder = build(samples.dense)
    executor = executor_of(builder)
    step(executor, builder)
    if running:
        executor.begin(builder.external)
        executor.wait_out()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(_try_everything(executor, builder))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    if running:
        executor.deliver(builder.late)
        executor.wait_end()
    inputs = build(samples.dense, 4)
    assert_bits(step(executor, inputs), inputs)
    executor.close()


def _try_everything(executor: Executor, builder: Builder) -> int:
    """The number of uses that were not refused."""
    wrong = 0
    uses = [
        lambda: executor.begin(builder.external),
        executor.wait_out,
        lambda: executor.deliver(builder.late),
        executor.wait_end,
        executor.invalidate,
        executor.counters,
        executor.events,
        lambda: executor.set_tracing(True),
    ]
    for use in uses:
        try:
            use()
            wrong += 1
        except ExecutionError as error:
            wrong += "forked" not in str(error)
    executor.abandon()
    executor.close()
    return wrong


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(6, 4, dtype=torch.int32), r"input 0 \(features\) is Int, the plan reads Float"),
        (torch.zeros(4, 6), r"input 0 \(features\) has shape \[4, 6\], the plan was made for \[6, 4\]"),
        (torch.zeros(4, 6).t(), r"input 0 \(features\) has strides \[1, 6\], the plan was made for \[4, 1\]"),
    ],
)
def test_an_external_tensor_of_another_layout_is_named(tensor: torch.Tensor, message: str) -> None:
    """Same bytes, other dtype, shape or strides: refused before anything runs, and the right one is taken."""

    def program(b: Builder, g: torch.Generator) -> None:
        b.call("sum.dim_IntList", b.input(torch.randn(6, 4, generator=g)), [1], keep="y")

    builder = build(program)
    graph, records = measured(builder)
    specs = {0: next(iter(builder.results.values())).spec}
    specs = {0: replace(specs[0], shape=(6, 4), stride=(4, 1))}
    with Executor(bump_plan(graph), graph.ops, records, clean={}, names={0: "features"}, specs=specs) as executor:
        with pytest.raises(ExecutionError, match=message):
            executor.begin({0: tensor})
        assert not executor.running
        assert_bits(step(executor, builder), builder)


def test_the_dtype_is_checked_without_specs() -> None:
    """What all readers agree on is enough to refuse integers in the place of floats of the same size."""
    builder = build(_product)
    with executor_of(builder) as executor:
        with pytest.raises(ExecutionError, match="external input 0 is Int, the plan reads Float"):
            executor.begin({0: torch.zeros(16, 16, dtype=torch.int32)})
        assert_bits(step(executor, builder), builder)


def test_engine_seconds_without_tracing() -> None:
    """time_ops measures ops and the engine's own time in an untraced step."""
    for time_ops in (False, True):
        with executor_of(build(samples.dense), options=EngineOptions(time_ops=time_ops)) as executor:
            step(executor, build(samples.dense))
            counters = executor.counters()
        if time_ops:
            assert 0 < counters["op_seconds"] < counters["step_seconds"]
            assert 0 < counters["engine_seconds"] < counters["step_seconds"]
        else:
            assert counters["op_seconds"] == counters["engine_seconds"] == 0


def test_a_lost_device_is_told_with_the_number_of_vertices_in_flight() -> None:
    """A GPU has many short kernels queued: the first are named."""
    graph, _ = measured(build(samples.dense))
    plan = bump_plan(graph)
    describer = Describer(plan, graph.ops, {})
    positions = [position for position, v in enumerate(plan.vertices) if v.id in kernels(plan)[:2]]
    error = EngineError(EngineStatus.FAILED, positions[0], "illegal access", True, True, False, positions, 30, (), 0)
    told = str(failure(error, plan, describer))
    assert f"in flight: {', '.join(map(describer.at, positions))} and 28 more; " in told
