"""Plans over several devices: transfers, arenas and links of their own, and eager's bits under any schedule."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache

import pytest
import torch

from disco_accel.errors import ConfigError, ExecutionError
from disco_accel.execute.executor import EngineOptions, Executor, HostLink, arena_bytes
from disco_accel.graph.copies import is_transfer
from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.measure.record import OpRecord
from disco_accel.native.arena import device_arena
from disco_accel.plan import make_plan
from disco_accel.plan.summary import swapped_bytes
from disco_accel.verify.static import verify
from tests.execute.device_programs import DeviceBuilder, RandomProgram, bump_on_devices, smallest_memory
from tests.execute.programs import assert_bits, measured, step

PROGRAMS = int(os.environ.get("DISCO_DEVICE_PROGRAMS", "24"))
"""Random programs to run; each on two budgets."""


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_random_programs_give_eager_bits(seed: int) -> None:
    """Tight verified plans of two to four devices, dispatched at random: every kept value, step after step."""
    program = RandomProgram(seed, length=16 + seed % 3 * 8, count=2 + seed % 3)
    first = program.build(0)
    graph, records = measured(first)
    least = smallest_memory(graph)
    for share in (1.0, 1.4):
        plan = make_plan(graph, memory=int(least * share) // 256 * 256, cyclic=True)
        verify(graph, plan)
        links = tuple(HostLink(latency=2e-5 * (d % 3)) for d in range(program.count))
        options = EngineOptions(dispatch="random", seed=seed, compute_streams=1 + seed % 2, lookahead=2, links=links)
        with Executor(plan, graph.ops, records, clean=first.clean, options=options) as executor:
            for data in range(3):
                inputs = program.build(data)
                assert_bits(step(executor, inputs), inputs)
            assert executor.counters()["transfer_bytes"] == swapped_bytes(plan, is_transfer)


def test_random_programs_have_it_all() -> None:
    """The programs above contain transfers of both sorts, offloads, reloads and values kept on every device."""
    kinds: set[VertexKind] = set()
    partial = kept = 0
    for seed in range(4):
        graph, _ = measured(RandomProgram(seed, length=24, count=3).build(0))
        plan = make_plan(graph, memory=smallest_memory(graph), cyclic=True)
        sizes = {(v.id, k): s for v in graph.vertices for k, s in enumerate(v.sizes)}
        kinds |= {v.kind for v in plan.vertices}
        moves = [v for v in graph.vertices if is_transfer(v)]
        partial += sum(v.sizes[0] < sizes[v.inputs[0]] for v in moves)
        kept += len({v.space for v in graph.vertices if v.keep}) > 1
    assert kinds == set(VertexKind)
    assert partial > 3 and kept > 1


def _executor(builder: DeviceBuilder, options: EngineOptions | None = None, **more: object) -> Executor:
    graph, records = measured(builder)
    plan, chosen = bump_on_devices(graph), options or EngineOptions()
    return Executor(plan, graph.ops, records, clean=builder.clean, options=chosen, **more)  # type: ignore[arg-type]


def _relay(data: int, late: bool = False) -> DeviceBuilder:
    """An external input of device 0 is transferred straight to device 1, whole and in part, and doubled there."""
    b = DeviceBuilder()
    x = b.input(torch.randn(6, 8, generator=torch.Generator().manual_seed(data)), late=late)
    b.at = 1
    b.call("mul.Tensor", b.transfer(x, 1), 2.0, keep="whole")
    b.transfer(x, 1, elements=11, keep="part")
    return b


@pytest.mark.parametrize("late", [False, True])
def test_a_transfer_follows_an_external_input(late: bool) -> None:
    """Transfers read the tensor that this step was given, not the one of the step before."""
    with _executor(_relay(0, late)) as executor:
        for data in range(4):
            inputs = _relay(data, late)
            got = step(executor, inputs)
            assert_bits(got, inputs)
            assert torch.equal(got["part"], (inputs.late if late else inputs.external)[0].flatten()[:11])


def test_the_comparison_notices_a_wrong_transfer() -> None:
    """A transfer planned to read another value of the same size gives other bits."""
    b = DeviceBuilder()
    x, y = (b.input(torch.full((4, 4), float(i))) for i in (1, 2))
    p, q = b.call("tanh", x), b.call("tanh", y)
    b.transfer(p, 1, keep="p")
    graph, records = measured(b)
    swapped = replace(graph, vertices=(*graph.vertices[:-1], replace(graph.vertices[-1], inputs=(q.ref,))))
    with (
        Executor(bump_on_devices(swapped), graph.ops, records, clean={}) as executor,
        pytest.raises(AssertionError, match="p differs from eager"),
    ):
        assert_bits(step(executor, b), b)


def test_links_are_throttled_for_each_device() -> None:
    """Reloads of device 0 are slow, those of device 1 fast; a transfer counts on the device that it reads from."""
    b = DeviceBuilder()
    weights = []
    for device in (0, 1):
        b.at = device
        weights.append(b.weight(torch.randn(64, 64)))
    x = b.input(torch.randn(64, 64))
    near = b.call("mm", x, weights[1])
    b.at = 0
    b.call("mm", b.transfer(near, 0), weights[0], keep="y")
    size = 64 * 64 * 4
    options = EngineOptions(links=(HostLink(bandwidth=size / 0.06), HostLink(latency=0.02)))
    with _executor(b, options) as executor:
        executor.set_tracing(True)
        assert_bits(step(executor, b), b)
        events = {(e.device, e.lane): e.end - e.issue for e in executor.events()}
    assert 0.06 <= events[0, "h2d"] < 0.2
    assert 0.02 <= events[1, "h2d"] < 0.055
    assert 0.02 <= events[1, "p2p"] < 0.055
    assert {key for key in events if key[1].startswith("compute")} == {(0, "compute0"), (1, "compute0")}


@cache
def _chains() -> tuple[DeviceBuilder, TaskGraph, dict[int, OpRecord]]:
    """One long chain of products on each of two devices, independent of each other."""
    b = DeviceBuilder()
    for device in (0, 1):
        b.at = device
        x = b.input(torch.randn(192, 192, generator=torch.Generator().manual_seed(device)) / 14)
        h = x
        for _ in range(12):
            h = b.call("mm", h, x)
        b.call("tanh", h, keep=f"end{device}")
    return b, *measured(b)


def test_devices_compute_at_the_same_time() -> None:
    """Kernels of two devices overlap in time: neither waits for the other chain to end. A busy machine may delay it."""
    builder, graph, records = _chains()
    with Executor(bump_on_devices(graph), graph.ops, records, clean={}) as executor:
        executor.set_tracing(True)

        def overlapped() -> bool:
            assert_bits(step(executor, builder), builder)
            events = [[e for e in executor.events() if e.device == device] for device in (0, 1)]
            (begin, end), (other_begin, other_end) = ((min(e.start for e in v), max(e.end for e in v)) for v in events)
            return begin < other_end and other_begin < end

        assert any(overlapped() for _ in range(100))


def test_arenas_are_given_by_device() -> None:
    """A mapping gives each device its arena; a missing one is made; one that is too small is named."""
    builder, graph, records = _chains()
    plan = bump_on_devices(graph)
    mine = {1: device_arena(arena_bytes(plan, 1), torch.device("cpu"))}
    with Executor(plan, graph.ops, records, clean={}, arena=mine) as executor:
        assert_bits(step(executor, builder), builder)
        end = builder.results["end1"]
        inside = executor.value(end.ref, end.spec).data_ptr() - mine[1].data_ptr()
        assert 0 <= inside < mine[1].numel()
    with pytest.raises(ExecutionError, match="arena of device 1 has 64 bytes"):
        Executor(plan, graph.ops, records, clean={}, arena={1: torch.zeros(64, dtype=torch.uint8)})
    with pytest.raises(ExecutionError, match="arena of device 1 is ordinary memory: make it with device_arena"):
        Executor(plan, graph.ops, records, clean={}, arena={1: torch.zeros(1 << 22, dtype=torch.uint8)})
    with pytest.raises(ConfigError, match="2 devices: say which one"):
        Executor(plan, graph.ops, records, clean={}, arena=mine[1])


def test_two_plans_share_the_arenas_of_their_devices() -> None:
    """Executors over the same arenas take turns; invalidate makes the switch safe."""
    programs = [RandomProgram(seed, count=2) for seed in (50, 51)]
    made = []
    for program in programs:
        builder = program.build(0)
        graph, records = measured(builder)
        made.append((builder, graph, records, make_plan(graph, memory=smallest_memory(graph), cyclic=True)))
    arenas = {d: device_arena(max(arena_bytes(plan, d) for *_, plan in made), torch.device("cpu")) for d in (0, 1)}
    executors = [Executor(plan, g.ops, r, clean=b.clean, arena=arenas) for b, g, r, plan in made]
    for data in range(3):
        for program, executor in zip(programs, executors, strict=True):
            executor.invalidate()
            inputs = program.build(data)
            assert_bits(step(executor, inputs), inputs)
    for executor in executors:
        executor.close()


def test_what_several_devices_cannot_do_is_refused() -> None:
    """Another number of links than devices, a bad link, and indices of GPUs: each says what is wrong."""
    builder, graph, records = _chains()
    plan = bump_on_devices(graph)
    for options, message in [
        (EngineOptions(links=(HostLink(),)), "links has 1 entries, the plan has 2 devices"),
        (EngineOptions(links=(HostLink(), HostLink(bandwidth=0.0))), "bandwidth above 0"),
        (EngineOptions(devices=(0, 1)), "are indices of GPUs, the plan runs on the cpu"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Executor(plan, graph.ops, records, clean=builder.clean, options=options)


def test_an_error_on_one_device_stops_all_and_the_next_step_works() -> None:
    """An index out of range on device 1 ends the step while device 0 computes; the vertex is named."""

    def program(bad: bool) -> DeviceBuilder:
        b = DeviceBuilder()
        h = x = b.input(torch.randn(96, 96, generator=torch.Generator().manual_seed(0)) / 10)
        for _ in range(30):
            h = b.call("mm", h, x)
        b.call("tanh", h, keep="chain")
        b.at = 1
        rows = b.input(torch.tensor([0, 1, 2]))
        b.call("index_select", b.transfer(x, 1), 0, rows, module="layers.1.embed", keep="picked")
        if bad:
            b.external[rows.ref[0]] = torch.tensor([0, 99, 2])
        return b

    with _executor(program(False)) as executor:
        with pytest.raises(ExecutionError, match=r"failed: aten::index_select in layers\.1\.embed: .*out of range"):
            step(executor, program(True))
        inputs = program(False)
        assert_bits(step(executor, inputs), inputs)
