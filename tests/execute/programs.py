"""Small programs for the engine's tests: each is built by running it eagerly, so what it should give is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from disco_accel.execute.executor import EngineOptions, Executor
from disco_accel.graph.memgraph import MemGraph, Slot
from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import (
    Arg,
    EnumArg,
    OpCall,
    OpResult,
    Ref,
    TaskGraph,
    TensorArg,
    TensorSpec,
    Vertex,
    VertexKind,
)
from disco_accel.graph.traits import FOREIGN, FROZEN, HOST_UPDATED, HOST_UPDATED_STATE, LATE_FOREIGN, STATE
from disco_accel.graph.values import is_foreign, overwrites
from disco_accel.measure.record import OpRecord, apply, record
from disco_accel.native.host_memory import bytes_of, footprint


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


@dataclass(frozen=True)
class Value:
    """A value of the program and the tensor that eager execution gave for it."""

    ref: Ref
    tensor: torch.Tensor

    @property
    def spec(self) -> TensorSpec:
        return spec_of(self.tensor)

    def view(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Value:
        """The same storage seen otherwise: costs no vertex."""
        seen = fn(self.tensor)
        assert seen.untyped_storage().data_ptr() == self.tensor.untyped_storage().data_ptr()
        return Value(self.ref, seen)


@dataclass
class Builder:
    """Appends vertices while running them eagerly, on ``device``; weights and homes of states stay on the host."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    vertices: list[Vertex] = field(default_factory=list)
    ops: dict[int, OpCall] = field(default_factory=dict)
    clean: dict[int, torch.Tensor] = field(default_factory=dict)
    states: dict[int, torch.Tensor] = field(default_factory=dict)
    external: dict[int, torch.Tensor] = field(default_factory=dict)
    late: dict[int, torch.Tensor] = field(default_factory=dict)
    results: dict[str, Value] = field(default_factory=dict)
    _names: dict[str, int] = field(default_factory=dict)

    def weight(self, tensor: torch.Tensor) -> Value:
        """A frozen input that the host holds."""
        vertex = self._input(tensor, traits=FROZEN)
        self.clean[vertex] = bytes_of(tensor)
        return Value((vertex, 0), tensor.to(self.device))

    def host_updated(self, tensor: torch.Tensor) -> Value:
        """An input that the host has and changes between steps."""
        vertex = self._input(tensor, traits=HOST_UPDATED)
        self.clean[vertex] = bytes_of(tensor)
        return Value((vertex, 0), tensor.to(self.device, copy=True))

    def state(self, home: torch.Tensor, host_updated: bool = False) -> Value:
        """A value that kernels change over steps, at home in ``home``. Eager execution changes a copy of it.
        ``host_updated``: the host changes it too, between steps."""
        vertex = self._input(home, traits=HOST_UPDATED_STATE if host_updated else STATE)
        self.states[vertex] = bytes_of(home)
        return Value((vertex, 0), home.to(self.device, copy=True))

    def input(self, tensor: torch.Tensor, late: bool = False) -> Value:
        """An input in foreign memory; ``late`` ones arrive at the gate."""
        tensor = tensor.to(self.device)
        vertex = self._input(tensor, traits=LATE_FOREIGN if late else FOREIGN)
        (self.late if late else self.external)[vertex] = tensor
        return Value((vertex, 0), tensor)

    def _input(self, tensor: torch.Tensor, **flags: bool) -> int:
        vertex = Vertex(len(self.vertices), VertexKind.INPUT, 0, sizes=(footprint(tensor),), **flags)  # type: ignore[arg-type]
        self.vertices.append(vertex)
        return vertex.id

    def call(
        self,
        name: str,
        *args: Any,
        module: str = "",
        out: str = "",
        keep: str = "",
        inplace: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Runs ``aten::<op>.<overload>`` eagerly and appends its vertex.

        ``keep`` names the first result as one to check at the end, ``out`` as one to check at the gate as well.
        """
        base, _, overload = name.partition(".")
        raw, refs, encoded = _run(name, args, kwargs)
        tensors = list(raw) if isinstance(raw, (tuple, list)) else [raw]
        vertex = len(self.vertices)
        results: list[OpResult | None] = []
        sizes: list[int] = []
        values: list[Value | None] = []
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                if tensor is None:
                    results.append(None)
                    values.append(None)
                continue
            results.append(OpResult(len(sizes), spec_of(tensor)))
            values.append(Value((vertex, len(sizes)), tensor))
            sizes.append(tensor.untyped_storage().nbytes())
        self.vertices.append(
            Vertex(
                vertex,
                VertexKind.KERNEL,
                0,
                op=f"aten::{base}",
                inputs=tuple(refs),
                sizes=tuple(sizes),
                out=bool(out),
                keep=bool(keep or out),
                inplace=((0, 0),) if inplace else (),
            )
        )
        self.ops[vertex] = OpCall(f"aten::{base}", overload or "default", encoded, tuple(results), module)
        if keep or out:
            first = values[0]
            assert first is not None
            self.results[keep or out] = first
        return values[0] if len(values) == 1 else values

    def call_writing(self, name: str, *args: Any, written: list[Value], **kwargs: Any) -> list[Value]:
        """As ``call``, for an op that returns nothing and writes over ``written``, in place; their new versions."""
        base, _, overload = name.partition(".")
        raw, refs, encoded = _run(name, args, kwargs)
        assert raw is None
        sizes = tuple(value.tensor.untyped_storage().nbytes() for value in written)
        inplace = tuple((output, refs.index(value.ref)) for output, value in enumerate(written))
        vertex = Vertex(len(self.vertices), VertexKind.KERNEL, 0, f"aten::{base}", tuple(refs), sizes, inplace=inplace)
        self.vertices.append(vertex)
        self.ops[vertex.id] = OpCall(f"aten::{base}", overload or "default", encoded, ())
        return [Value((vertex.id, output), value.tensor) for output, value in enumerate(written)]

    def graph(self, name: str = "test") -> TaskGraph:
        return TaskGraph(name, (Space(0, 1 << 40),), tuple(self.vertices), self.ops)


def _run(name: str, args: Any, kwargs: Any) -> tuple[Any, list[Ref], tuple[Arg, ...]]:
    """What the op gives for eager tensors, the values that it reads, and its arguments."""
    base, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, base), overload or "default")
    refs: list[Ref] = []
    encoded, given = [], []
    for position, argument in enumerate(op._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
        encoded.append(_encode(value, refs))
        given.append(_plain(value))
    positional = [v for v, a in zip(given, op._schema.arguments, strict=True) if not a.kwarg_only]
    named = {a.name: v for v, a in zip(given, op._schema.arguments, strict=True) if a.kwarg_only}
    return op(*positional, **named), refs, tuple(encoded)


def _encode(value: Any, refs: list[Ref]) -> Arg:
    if isinstance(value, Value):
        refs.append(value.ref)
        return TensorArg(len(refs) - 1, value.spec)
    if isinstance(value, (list, tuple)):
        return tuple(_encode(item, refs) for item in value)
    for kind, types in (("dtype", torch.dtype), ("layout", torch.layout), ("device", torch.device)):
        if isinstance(value, types):
            return EnumArg(kind, str(value).removeprefix("torch."))
    if isinstance(value, torch.memory_format):
        return EnumArg("memory_format", str(value).removeprefix("torch."))
    assert value is None or isinstance(value, (bool, int, float, str))
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Value):
        return value.tensor
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def bump_plan(graph: TaskGraph) -> MemGraph:
    """Every value at an address of its own, one after the other: no reuse, so no memory edges."""
    slots: dict[Ref, Slot] = {}
    top = 0
    for vertex in graph.vertices:
        for k, size in enumerate(vertex.sizes):
            if is_foreign(vertex) or size == 0:
                continue
            over = dict(overwrites(vertex)).get(k)
            if over is not None:
                slots[vertex.id, k] = slots[over]
                continue
            slots[vertex.id, k] = Slot(0, top)
            top += -(-size // 256) * 256
    edges = {(producer, v.id) for v in graph.vertices for producer, _ in v.inputs}
    edges |= {(u, v.id) for v in graph.vertices for u in v.after}
    # An in-place writer waits for the other readers of what it overwrites.
    anti = set()
    for vertex in graph.vertices:
        for _, target in overwrites(vertex):
            anti |= {(v.id, vertex.id) for v in graph.vertices if target in v.inputs and v.id < vertex.id}
    return MemGraph(
        graph.name,
        (Space(0, top),),
        graph.vertices,
        slots,
        tuple(sorted(edges)),
        tuple(sorted(anti)),
        cyclic=True,
    )


Program = Callable[[Builder, torch.Generator], None]


def build(program: Program, seed: int = 0, device: torch.device | None = None) -> Builder:
    """The program with inputs drawn from ``seed``; its weights are always the same."""
    builder = Builder(device=device or torch.device("cpu"))
    program(builder, torch.Generator().manual_seed(seed))
    return builder


def measured(builder: Builder) -> tuple[TaskGraph, dict[int, OpRecord]]:
    graph = builder.graph()
    records = record(graph, device=str(builder.device))
    return apply(graph, records), records


def executor_of(
    builder: Builder,
    plan: Callable[[TaskGraph], MemGraph] = bump_plan,
    options: EngineOptions | None = None,
) -> Executor:
    graph, records = measured(builder)
    return Executor(plan(graph), graph.ops, records, clean=builder.clean, options=options or EngineOptions())


def step(executor: Executor, inputs: Builder, results: Mapping[str, Value] | None = None) -> dict[str, torch.Tensor]:
    """Runs one step on the inputs of ``inputs`` and returns clones of all kept values."""
    executor.begin(inputs.external)
    executor.wait_out()
    if inputs.late:
        executor.deliver(inputs.late)
    executor.wait_end()
    wanted = inputs.results if results is None else results
    return {name: executor.value(value.ref, value.spec).clone() for name, value in wanted.items()}


def step_in_two(executor: Executor, inputs: Builder) -> dict[str, torch.Tensor]:
    """As ``step``, with ``run_out``, ``run_end`` and ``leave``."""
    group = executor.add_leaving([(value.ref, value.spec) for value in inputs.results.values()])
    executor.run_out(inputs.external)
    if inputs.late:
        executor.run_end(inputs.late)
    else:
        executor.wait_end()
    return dict(zip(inputs.results, executor.leave(group), strict=True))


def assert_bits(got: Mapping[str, torch.Tensor], expected: Builder, names: Iterable[str] | None = None) -> None:
    """Every kept value has the bits that eager execution gave (NaNs included)."""
    for name in names or expected.results:
        want = expected.results[name].tensor
        assert got[name].dtype == want.dtype and got[name].shape == want.shape, name
        same = torch.equal(_bits(got[name]), _bits(want))
        assert same, (
            f"{name} differs from eager by up to {(got[name].cpu().double() - want.cpu().double()).abs().max()}"
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).cpu()
