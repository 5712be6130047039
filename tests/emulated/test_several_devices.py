"""Plans over several GPUs: eager's bits of one GPU, however copies get from one to the other."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from disco_accel.errors import ConfigError, ExecutionError
from disco_accel.execute.executor import EngineOptions, Executor, arena_bytes
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import RngSite, VertexKind
from disco_accel.measure.record import OpRecord
from disco_accel.native import cuda_backend
from disco_accel.native.arena import device_arena
from disco_accel.native.cuda_backend import peer_path
from disco_accel.plan import make_plan
from disco_accel.verify.static import verify
from tests.emulated import device
from tests.execute.device_programs import DeviceBuilder, RandomProgram, bump_on_devices, smallest_memory
from tests.execute.programs import assert_bits, measured

COUNT = torch.cuda.device_count()
FIRST = torch.device("cuda", 0)
DIRECT = os.environ.get("EMULATED_PEERS") not in ("none", "wrong")
PROGRAMS = int(os.environ.get("DISCO_DEVICE_PROGRAMS", "8"))
"""Random programs to run."""


@pytest.fixture(autouse=True)
def several() -> None:
    assert COUNT > 1, "run it with more than one device"


def step(executor: Executor, inputs: DeviceBuilder) -> dict[str, torch.Tensor]:
    """One step, of which alone the counts of the devices are then; the kept values, each where it lies. Inputs of a
    device lie on that device."""

    def where(tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        by_id = {v.id: v.space for v in inputs.vertices}
        # By way of the host: PyTorch's own copies take whatever path there is.
        return {v: t if not by_id[v] else t.cpu().to(torch.device("cuda", by_id[v])) for v, t in tensors.items()}

    external, late = where(inputs.external), where(inputs.late)
    for number in range(COUNT):
        torch.cuda.synchronize(number)
    assert not device.complaints(), device.complaints()
    device.reset()
    executor.begin(external)
    executor.wait_out()
    if late:
        executor.deliver(late)
    executor.wait_end()
    return {name: executor.value(value.ref, value.spec).clone() for name, value in inputs.results.items()}


def builder(count: int = 2) -> DeviceBuilder:
    return DeviceBuilder(device=FIRST, count=count)


def gpus(count: int, **more: object) -> EngineOptions:
    return EngineOptions(device="cuda", devices=tuple(range(count)), **more)  # type: ignore[arg-type]


def executor_of(made: DeviceBuilder, options: EngineOptions | None = None) -> Executor:
    graph, records = measured(made)
    return Executor(bump_on_devices(graph), graph.ops, records, clean=made.clean, options=options or gpus(made.count))


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_random_programs_give_the_bits_of_one_device(seed: int) -> None:
    """Tight verified plans, dispatched at random: every kept value, step after step, and nothing allocated in one."""
    count = 2 + seed % (COUNT - 1)
    program = RandomProgram(seed, length=16 + seed % 3 * 8, count=count, where=FIRST)
    first = program.build(0)
    graph, records = measured(first)
    plan = make_plan(graph, memory=smallest_memory(graph) * (5 + seed % 2) // 5 // 256 * 256, cyclic=True)
    verify(graph, plan)
    options = gpus(count, dispatch="random", seed=seed, compute_streams=1 + seed % 2, lookahead=seed % 3)
    with Executor(plan, graph.ops, records, clean=first.clean, options=options) as executor:
        for data in range(3):
            inputs = program.build(data)
            assert_bits(step(executor, inputs), inputs)
            assert executor.counters()["c10_allocations"] == 0
            _paths_are_right()


def _paths_are_right() -> None:
    """No copy took a path that the driver chose, and none went straight where bytes are changed on the way."""
    counts = device.counts()
    assert "copy p2p staged" not in counts
    if not DIRECT:
        assert "copy p2p" not in counts


def relay(rows: int, data: int = 0) -> DeviceBuilder:
    """A matrix goes from device to device and gets a product on each; the last one's is kept there."""
    b = builder(COUNT)
    drawn = torch.Generator().manual_seed(data)
    value = b.input(torch.randn(rows, 64, generator=drawn))
    for number in range(COUNT):
        b.at = number
        weight = b.weight(torch.randn(64, 64, generator=torch.Generator().manual_seed(number)) / 8)
        value = b.call("mm", b.transfer(value, number) if number else value, weight, keep=f"on {number}")
    b.at = 0
    b.call("tanh", b.transfer(value, 0), keep="home")
    return b


@pytest.mark.parametrize("rows", [1, 100, 40_000])
def test_a_value_goes_round_all_devices(rows: int) -> None:
    """Also one that is too large for the page-locked memory on its way."""
    with executor_of(relay(rows)) as executor:
        for data in range(2):
            inputs = relay(rows, data)
            got = step(executor, inputs)
            _paths_are_right()
            counts = device.counts()
            assert counts.get("copy p2p", 0) == (COUNT if DIRECT else 0)
            # The first step loads the weights, which are not pinned here.
            assert "copy d2h pageable" not in counts and (not data or "copy h2d pageable" not in counts)
            assert_bits(got, inputs)


def test_what_the_paths_are_is_known_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """Of a driver that changes bytes the user hears once."""
    expected = {"right": "direct", "none": "no_access", "wrong": "wrong_bytes"}
    second = torch.device("cuda", 1)
    path = expected[os.environ.get("EMULATED_PEERS") or "right"]
    assert peer_path(FIRST, second) == peer_path(second, FIRST) == path
    cuda_backend._tell_of_peer_path.cache_clear()
    with caplog.at_level(logging.WARNING, logger="disco_accel"):
        for _ in range(2):
            executor_of(relay(4)).close()
    told = [
        record for record in caplog.records if "arrive at cuda:1 than a copy straight from cuda:0" in record.message
    ]
    assert len(told) == (1 if path == "wrong_bytes" else 0)


def test_arenas_lie_on_their_devices() -> None:
    """Those made here, those given; one on another device is refused."""
    made = relay(8)
    graph, records = measured(made)
    plan = bump_on_devices(graph)
    with Executor(plan, graph.ops, records, clean=made.clean, options=gpus(COUNT)) as executor:
        got = step(executor, made)
        assert [got[f"on {n}"].device.index for n in range(COUNT)] == list(range(COUNT))
    mine = {1: device_arena(arena_bytes(plan, 1), torch.device("cuda", 1))}
    with Executor(plan, graph.ops, records, clean=made.clean, options=gpus(COUNT), arena=mine) as executor:
        assert_bits(step(executor, made), made)
    with pytest.raises(ExecutionError, match="arena of device 0 is on cuda:1, but the device is cuda:0"):
        Executor(plan, graph.ops, records, clean=made.clean, options=gpus(COUNT), arena={0: mine[1]})


def test_devices_of_a_plan_are_named() -> None:
    """In any order and one for two; too few, or ones that are not there, are refused."""
    made = relay(8)
    backwards = EngineOptions(device="cuda", devices=tuple(range(COUNT)))
    with executor_of(made, backwards) as executor:
        assert_bits(step(executor, made), made)
    for options, message in [
        (
            EngineOptions(device="cuda"),
            f"the plan has {COUNT} devices beside those in host memory, and cuda:0 is given",
        ),
        (EngineOptions(device="cuda:1", devices=tuple(range(COUNT))), "the first is cuda:0, but device is cuda:1"),
        (EngineOptions(device="cuda", devices=tuple(range(1, COUNT + 1))), f"cuda:{COUNT} is not there"),
    ]:
        with pytest.raises(ConfigError, match=message):
            executor_of(made, options)


def test_one_gpu_may_be_two_devices_of_a_plan() -> None:
    program = RandomProgram(3, length=16, count=2, where=FIRST)
    with executor_of(program.build(0), EngineOptions(device="cuda", devices=(0, 0))) as executor:
        for data in range(2):
            inputs = program.build(data)
            external, late = inputs.external, inputs.late
            executor.begin(external)
            executor.wait_out()
            executor.deliver(late)
            executor.wait_end()
            got = {name: executor.value(v.ref, v.spec).clone() for name, v in inputs.results.items()}
            assert_bits(got, inputs)


def test_the_callers_device_stays_current() -> None:
    made = relay(8)
    for current in range(COUNT):
        with torch.cuda.device(current), executor_of(made) as executor:
            got = step(executor, made)
            assert torch.cuda.current_device() == current
        assert_bits(got, made)


def test_a_call_that_names_its_device_runs_where_it_is_put() -> None:
    """Captured on the first device, as ``arange(..., device="cuda:0")`` is, and a cast that names it."""
    b = builder()
    x = b.input(torch.randn(6, 6))
    b.at = 1
    steps = b.call("arange.start_step", 0, 36, 1, dtype=torch.float32, device=FIRST)
    there = b.call("_to_copy", b.transfer(x, 1), dtype=torch.float64, device=FIRST)
    b.call("add.Tensor", there, steps.view(lambda t: t.view(6, 6)), keep="sum")
    with executor_of(b) as executor:
        got = step(executor, b)
        assert got["sum"].device.index == 1
        assert_bits(got, b)


@pytest.mark.parametrize("first_at", [0, 1])
def test_random_ops_draw_from_the_scripts_generator_wherever_they_run(first_at: int) -> None:
    """The numbers of one device, in order, also where one op draws again what another device has drawn."""
    torch.manual_seed(5)
    other = torch.cuda.get_rng_state(1)
    b = builder()
    x = b.input(torch.ones(64, 64))
    values = {0: x, 1: None}
    b.at = 1
    values[1] = b.transfer(x, 1)
    sites = {}
    before = torch.cuda.get_rng_state(FIRST)
    for number, (at, site) in enumerate(
        [(first_at, RngSite(0, False)), (1 - first_at, RngSite(-1, False)), (1 - first_at, RngSite(0, True))]
    ):
        b.at = at
        live = torch.cuda.get_rng_state(FIRST)
        if site.replay:
            torch.cuda.set_rng_state(before, FIRST)
        b.call("native_dropout", values[at], 0.5, True, keep=f"dropped {number}")
        if site.replay:
            torch.cuda.set_rng_state(live, FIRST)
        b.vertices[-1] = replace(b.vertices[-1], after=tuple(sites))
        sites[b.vertices[-1].id] = site
    expected = torch.cuda.get_rng_state(FIRST)
    graph, records = measured(b)
    ops = {vertex: replace(call, rng=sites[vertex]) for vertex, call in graph.ops.items()}
    plan = bump_on_devices(graph)
    with Executor(plan, ops, records, clean={}, options=gpus(2)) as executor:
        for _ in range(2):
            torch.cuda.set_rng_state(before, FIRST)
            assert_bits(step(executor, b), b)
            assert torch.equal(torch.cuda.get_rng_state(FIRST), expected)
            assert torch.equal(torch.cuda.get_rng_state(1), other)
    assert torch.equal(b.results["dropped 0"].tensor, b.results["dropped 2"].tensor)


def test_an_error_on_one_device_stops_all_and_the_next_step_works() -> None:
    """A kernel of the second device asks for more than was recorded; its name is told."""
    b = builder()
    x = b.input(torch.randn(16, 16))
    h = x
    for _ in range(6):
        h = b.call("mm", h, x)
    b.call("tanh", h, keep="chain")
    b.at = 1
    b.call("mm", b.transfer(x, 1), b.transfer(x, 1), module="layers.1", keep="far")
    with executor_of(b) as executor:
        failing = max(i for i, v in enumerate(v for v in b.vertices if v.kind is VertexKind.KERNEL))
        executor._engine.fail_at(failing)
        with pytest.raises(ExecutionError, match=r"aten::mm in layers\.1: failed because a test asked for it"):
            step(executor, b)
        executor._engine.fail_at(-1)
        assert_bits(step(executor, b), b)


def test_a_copy_of_the_callers_ends_before_the_next_step_writes_there() -> None:
    """The copy is of memory of the second device, to which a stream of the first writes."""

    def program(data: int) -> DeviceBuilder:
        b = builder()
        x = b.input(torch.full((64, 64), float(data)))
        b.transfer(x, 1, keep="there")
        return b

    with executor_of(program(0)) as executor:
        first = program(1)
        executor.begin(first.external)
        executor.wait_end()
        there = first.results["there"]
        with torch.cuda.device(1):
            torch.cuda._sleep(20_000_000)
            copy = executor.value(there.ref, there.spec).clone()
        executor.begin(program(2).external)
        executor.wait_end()
        assert copy.cpu().eq(1).all()


def _plans() -> list[tuple[RandomProgram, DeviceBuilder, MemGraph, dict[int, OpRecord]]]:
    made = []
    for seed in (50, 51):
        program = RandomProgram(seed, count=2, where=FIRST)
        first = program.build(0)
        graph, records = measured(first)
        made.append((program, first, make_plan(graph, memory=smallest_memory(graph), cyclic=True), records))
    return made


def test_two_plans_share_the_arenas_of_their_devices() -> None:
    """Each writes where the other's values were: after the caller's copies of those, also from another device."""
    made = _plans()
    arenas = {
        d: device_arena(max(arena_bytes(plan, d) for *_, plan, _ in made), torch.device("cuda", d)) for d in (0, 1)
    }
    executors = [
        Executor(plan, first.graph().ops, records, clean=first.clean, options=gpus(2), arena=arenas)
        for _, first, plan, records in made
    ]
    for data in range(3):
        for (program, *_), executor in zip(made, executors, strict=True):
            executor.invalidate()
            inputs = program.build(data)
            assert_bits(step(executor, inputs), inputs)
    for executor in executors:
        executor.close()
