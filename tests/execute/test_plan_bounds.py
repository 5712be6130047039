"""Addresses outside the registered memory are refused when a plan is lowered, and once more by the engine itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from disco_accel.errors import ExecutionError
from disco_accel.execute import executor as module
from disco_accel.execute.executor import Executor
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import Vertex, VertexKind, with_memory
from disco_accel.native.arena import host_arena
from disco_accel.native.engine_numbers import CopyLane
from disco_accel.native.extension import load_extension
from disco_accel.plan import make_plan
from tests.execute.programs import Builder, assert_bits, build, measured, step

BIG = (1 << 63) - 1
FAR = 1 << 40


def leaving(builder: Builder, rng: torch.Generator) -> None:
    """Products that all are needed again at the end; within LEAST bytes two of them must leave."""
    weight = builder.weight(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))
    values = [builder.input(torch.randn(8, 8, generator=rng))]
    for _ in range(5):
        values.append(builder.call("mm", values[-1], weight))
    for earlier in values[-2:0:-1]:
        values.append(builder.call("mul.Tensor", values[-1], earlier))
    builder.call("tanh", values[-1], keep="result")


LEAST = 1024


@pytest.fixture(scope="module")
def lowered() -> tuple[Builder, Any, Any, MemGraph]:
    first = build(leaving)
    graph, records = measured(first)
    plan = make_plan(with_memory(graph, lambda device: LEAST), cyclic=True)
    assert any(map(swaps_out, plan.vertices)) and any(map(swaps_in, plan.vertices))
    return first, graph, records, plan


Which = Callable[[Vertex], bool]


def is_kernel(vertex: Vertex) -> bool:
    return vertex.kind is VertexKind.KERNEL


def is_input(vertex: Vertex) -> bool:
    return vertex.kind is VertexKind.INPUT


def _at(which: Which, **changes: int) -> Callable[[MemGraph], MemGraph]:
    def moved(plan: MemGraph) -> MemGraph:
        ref = next((v.id, 0) for v in plan.vertices if which(v) and (v.id, 0) in plan.slots)
        return replace(plan, slots={**plan.slots, ref: replace(plan.slots[ref], **changes)})

    return moved


def _host(offset: int) -> Callable[[MemGraph], MemGraph]:
    return _at(swaps_out, offset=offset)


PLANS: dict[str, Callable[[MemGraph], MemGraph]] = {
    "no host memory": lambda plan: replace(plan, spaces=plan.devices),
    "host offset far": _host(1 << 46),
    "host offset at the end": lambda plan: _host(plan.host.memory)(plan),
    "host offset negative": _host(-256),
    "host offset overflows": _host(BIG // 256 * 256),
    "host offset unaligned": _host(1),
    "kernel before the arena": _at(is_kernel, offset=-256),
    "reload before the arena": _at(swaps_in, offset=-256),
    "resident before the arena": _at(is_input, offset=-256),
    "kernel unaligned": _at(is_kernel, offset=4),
    "slot on no device": _at(is_kernel, space=7),
}


@pytest.mark.parametrize("wrong", PLANS)
def test_lowering_refuses_addresses_outside_the_arenas(wrong: str, lowered: Any) -> None:
    """With the vertex named; also where nobody verified the plan."""
    first, graph, records, plan = lowered
    with pytest.raises(ExecutionError, match=r"vertex \d+|offload \d+"):
        Executor(PLANS[wrong](plan), graph.ops, records, clean=first.clean)


def test_a_reload_of_more_than_the_host_holds_is_refused(lowered: Any) -> None:
    first, graph, records, plan = lowered
    short = {vertex: held[:-1] for vertex, held in first.clean.items()}
    with pytest.raises(ExecutionError, match="host bytes"):
        Executor(plan, graph.ops, records, clean=short)


class Engines:
    """Stands where the engine's class stands and changes what the executor hands to it."""

    def __init__(self, change: Callable[[list[Any], Any], None]) -> None:
        load_extension()
        self.real, self.change = torch.classes.disco_accel, change

    def Ops(self, device: str) -> Any:
        return self.real.Ops(device)

    def Engine(self, *arguments: Any) -> Any:
        given = list(arguments)
        self.change(given, given[1])
        return self.real.Engine(*given)


def _row(table: torch.Tensor, which: VertexKind | CopyLane) -> torch.Tensor:
    """The first kernel, or the first copy of a lane."""
    kind = VertexKind.COPY if isinstance(which, CopyLane) else which
    chosen = table[:, 0] == int(kind)
    if isinstance(which, CopyLane):
        chosen &= table[:, 2] == int(which)
    return chosen.nonzero()[0, 0]


def _set(
    which: VertexKind | CopyLane, column: int, value: int, *, add: bool = False
) -> Callable[[list[Any], Any], None]:
    def change(given: list[Any], table: torch.Tensor) -> None:
        row = _row(table, which)
        table[row, column] = table[row, column] + value if add else value

    return change


def _arenas(count: int) -> Callable[[list[Any], Any], None]:
    def change(given: list[Any], table: torch.Tensor) -> None:
        given[4] = [given[4][0]] * count

    return change


def _smaller_arena(given: list[Any], table: torch.Tensor) -> None:
    given[4] = [host_arena(given[4][0].numel() - 256)]


def _other_host(given: list[Any], table: torch.Tensor) -> None:
    given[5] = host_arena(given[5].numel())


def _without_weights(given: list[Any], table: torch.Tensor) -> None:
    given[6] = []


def _edge(given: list[Any], table: torch.Tensor) -> None:
    given[2] = torch.cat([given[2], torch.tensor([[1 << 32, (1 << 32) + 1]])])


def _copied(storage: int, vertex: int, writes: int = 0) -> Callable[[list[Any], Any], None]:
    def change(given: list[Any], table: torch.Tensor) -> None:
        given[3] = torch.tensor([[storage, vertex, writes]])

    return change


KIND, DEVICE, LANE, OP, DST, SRC, BYTES, NS, FLAGS = range(9)
OFFLOAD, RELOAD, KERNEL = CopyLane.D2H, CopyLane.H2D, VertexKind.KERNEL
ENGINE: dict[str, tuple[Callable[[list[Any], Any], None], str]] = {
    "offload far away": (_set(OFFLOAD, DST, FAR, add=True), "to the host.*writes"),
    "offload behind the end": (_set(OFFLOAD, DST, 1 << 12, add=True), "to the host.*writes"),
    "offload before the start": (_set(OFFLOAD, DST, -256, add=True), "to the host.*writes"),
    "offload to an absolute address": (_set(OFFLOAD, DST, 4096), "to the host.*writes"),
    "offload of other memory": (_set(OFFLOAD, SRC, FAR, add=True), "to the host.*reads"),
    "offload of more": (_set(OFFLOAD, BYTES, 1 << 20), "to the host"),
    "offload of all there is": (_set(OFFLOAD, BYTES, BIG), "to the host"),
    "offload of less than nothing": (_set(OFFLOAD, BYTES, -1), "negative"),
    "reload far away": (_set(RELOAD, DST, FAR, add=True), "from the host.*writes"),
    "reload of other memory": (_set(RELOAD, SRC, FAR, add=True), "from the host.*reads"),
    "reload of the highest address": (_set(RELOAD, SRC, -64), "from the host.*reads"),
    "a kind of nine bits": (_set(KERNEL, KIND, 256), "kind"),
    "a device of 33 bits": (_set(KERNEL, DEVICE, 1 << 32), "device"),
    "an op of 33 bits": (_set(KERNEL, OP, 1 << 32), "op"),
    "an op that is not there": (_set(KERNEL, OP, 10_000), "no op"),
    "a lane of nine bits": (_set(RELOAD, LANE, 256), "lane"),
    "a lane that is not there": (_set(RELOAD, LANE, 3), "no such kind"),
    "a kernel of less than no time": (_set(KERNEL, NS, -1), "negative time"),
    "flags of nine bits": (_set(KERNEL, FLAGS, 256), "flags"),
    "an edge of 33 bits": (_edge, "edge"),
    "a smaller arena": (_smaller_arena, "outside"),
    "no arena": (_arenas(0), "there are 0 arenas"),
    "two arenas": (_arenas(2), "there are 2 arenas"),
    "another host arena": (_other_host, "outside"),
    "no weights": (_without_weights, "outside"),
    "a source that is no external storage": (_copied(10_000, 0), "no transfer|not external"),
    "a source of what is no transfer": (_copied(0, 3), "no transfer|not external"),
    "a source of no vertex": (_copied(0, -1), "no transfer|not external"),
    "a target that is no external storage": (_copied(10_000, 0, 1), "no transfer|not external"),
}


@pytest.mark.parametrize("wrong", ENGINE)
def test_the_engine_refuses_a_program_that_leaves_its_memory(
    wrong: str, lowered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables that are changed behind the executor's back, on their way into C++."""
    first, graph, records, plan = lowered
    change, message = ENGINE[wrong]
    engines = Engines(change)
    fake = type("classes", (), {"disco_accel": engines})
    monkeypatch.setattr(module.torch, "classes", fake)
    with pytest.raises(ExecutionError, match=message):
        Executor(plan, graph.ops, records, clean=first.clean)


STORAGES: dict[str, Callable[[Any, int], None]] = {
    "a storage": lambda ops, base: ops.add_fixed(base + FAR, 256),
    "a storage that begins inside": lambda ops, base: ops.add_fixed(base, 1 << 20),
    "an allocation": lambda ops, base: ops.set_schedule(0, [base + FAR], [256]),
    "the end of an allocation": lambda ops, base: ops.set_schedule(0, [base], [BIG]),
    "room for more": lambda ops, base: ops.set_loose(0, base - 256, 256),
}


@pytest.mark.parametrize("wrong", STORAGES)
def test_the_engine_refuses_ops_whose_memory_lies_elsewhere(
    wrong: str, lowered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, graph, records, plan = lowered

    def change(given: list[Any], table: torch.Tensor) -> None:
        STORAGES[wrong](given[0], given[4][0].data_ptr())

    monkeypatch.setattr(module.torch, "classes", type("classes", (), {"disco_accel": Engines(change)}))
    with pytest.raises(ExecutionError, match="outside the arenas"):
        Executor(plan, graph.ops, records, clean=first.clean)


@pytest.mark.parametrize("call", ["add_fixed", "add_external", "set_schedule", "set_loose"])
def test_the_engine_refuses_negative_sizes(call: str, lowered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, graph, records, plan = lowered
    arguments = {
        "add_fixed": (0, -1),
        "add_external": (-1,),
        "set_schedule": (0, [0], [-1]),
        "set_loose": (0, 0, -1),
    }

    def change(given: list[Any], table: torch.Tensor) -> None:
        getattr(given[0], call)(*arguments[call])

    monkeypatch.setattr(module.torch, "classes", type("classes", (), {"disco_accel": Engines(change)}))
    with pytest.raises(ExecutionError, match="size of -1"):
        Executor(plan, graph.ops, records, clean=first.clean)


def test_the_unchanged_program_runs(lowered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, graph, records, plan = lowered
    monkeypatch.setattr(
        module.torch, "classes", type("classes", (), {"disco_accel": Engines(lambda given, table: None)})
    )
    with Executor(plan, graph.ops, records, clean=first.clean) as executor:
        assert_bits(step(executor, first), first)


def test_ranges_of_an_arena_are_checked_without_overflow() -> None:
    arena = host_arena(1024)
    for offset, nbytes in ((BIG, 1), (1, BIG), (-1, 1), (0, -1), (1024, 1), (BIG, BIG)):
        with pytest.raises(ValueError, match="outside an arena"):
            torch.ops.disco_accel.carve(arena, offset, nbytes)
    with pytest.raises(ValueError, match="cannot have"):
        host_arena(BIG)
