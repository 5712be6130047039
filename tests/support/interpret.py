"""The plainest executor of a captured graph: torch's functional ops, one vertex at a time, a tensor per value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from disco_accel.errors import ExecutionError
from disco_accel.fuse.evaluate import evaluate
from disco_accel.graph.taskgraph import (
    Arg,
    EnumArg,
    OpCall,
    Ref,
    RngSite,
    TaskGraph,
    TensorArg,
    TensorSpec,
    Vertex,
    VertexKind,
    is_fused,
)
from disco_accel.graph.values import must_survive_step, overwrites


def interpret(
    graph: TaskGraph, inputs: Mapping[int, torch.Tensor], *, overwrite: bool = False
) -> dict[Ref, torch.Tensor]:
    """Run ``graph`` in serial order on the CPU.

    ``overwrite``: wherever ``may_inplace`` and the last use of an input allow it, write the output over it.

    ``inputs``: INPUT id → tensor whose first element is the first byte of the value. Returns the storage of every
    value as a 1-d uint8 tensor; ``view`` reads it. A layout that differs from the captured one is an error:
    later ops would read the wrong elements.

    Raises:
        ExecutionError: an op failed, or returned another dtype, shape or stride than captured.
    """
    values: dict[Ref, torch.Tensor] = {}
    states: dict[int, torch.Tensor] = {}
    last = {ref: vertex.id for vertex in graph.vertices for ref in vertex.inputs}
    kept = {v.id for v in graph.vertices if must_survive_step(v) or v.kind is VertexKind.INPUT}
    with torch.no_grad():
        for vertex in graph.vertices:
            if vertex.kind is VertexKind.INPUT:
                values[vertex.id, 0] = _own_bytes(inputs[vertex.id], vertex.sizes[0])
            else:
                refs = [vertex.inputs[p] for p in vertex.may_inplace] if overwrite else []
                over = next((r for r in refs if last[r] == vertex.id and r[0] not in kept), None)
                with _generator(graph.ops[vertex.id].rng, states):
                    _run(vertex, graph.ops[vertex.id], values, over)
    return values


@contextmanager
def _generator(site: RngSite | None, states: dict[int, torch.Tensor]) -> Iterator[None]:
    """The default generator as ``site`` wants it; ``states`` holds one by slot."""
    if site is None or not site.replay:
        if site is not None:
            states[site.slot] = torch.get_rng_state()
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(states[site.slot])
        yield


def view(storage: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """``storage`` (uint8) seen through ``spec``."""
    dtype = getattr(torch, spec.dtype)
    base = torch.empty(0, dtype=dtype).set_(storage.untyped_storage())
    seen: torch.Tensor = base.as_strided(spec.shape, spec.stride, spec.offset)
    return seen


def serial_peak(graph: TaskGraph) -> int:
    """Most bytes of kernel outputs alive at once in serial order, each freed after its last reader."""
    last = {ref: index for index, vertex in enumerate(graph.vertices) for ref in vertex.inputs}
    dying: dict[int, list[Ref]] = {}
    for ref, index in last.items():
        dying.setdefault(index, []).append(ref)
    size = {(v.id, k): n for v in graph.vertices for k, n in enumerate(v.sizes) if v.kind is not VertexKind.INPUT}
    kept = {v.id for v in graph.vertices if must_survive_step(v)}
    live = peak = 0
    for index, vertex in enumerate(graph.vertices):
        mine = [ref for ref in size if ref[0] == vertex.id] if vertex.kind is not VertexKind.INPUT else []
        live += sum(size[ref] for ref in mine if ref[1] not in dict(vertex.inplace))
        peak = max(peak, live)
        live -= sum(size[ref] for ref in mine if ref not in last and vertex.id not in kept)
        for ref in dying.get(index, []):
            in_place = any(overwritten == ref for _, overwritten in overwrites(vertex))
            if ref[0] not in kept and not in_place:
                live -= size.get(ref, 0)
    return peak


def _own_bytes(tensor: torch.Tensor, size: int) -> torch.Tensor:
    storage = torch.empty(size, dtype=torch.uint8)
    layout = (tensor.shape, tensor.stride())
    torch.empty(0, dtype=tensor.dtype).set_(storage.untyped_storage()).as_strided(*layout).copy_(tensor)
    return storage


def _run(vertex: Vertex, call: OpCall, values: dict[Ref, torch.Tensor], over: Ref | None) -> None:
    if is_fused(call):
        args = [_argument(arg, [values[ref] for ref in vertex.inputs]) for arg in call.args]
        for result, made in zip(call.results, evaluate(call, args), strict=True):
            assert result is not None
            values[vertex.id, result.output] = torch.empty(vertex.sizes[result.output], dtype=torch.uint8)
            view(values[vertex.id, result.output], result.spec).copy_(made)
        return
    where = f"vertex {vertex.id} {call.name}.{call.overload} in module {call.module or '?'}"
    namespace, name = call.name.split("::")
    op = getattr(getattr(getattr(torch.ops, namespace), name), call.overload)
    storages = [values[ref] for ref in vertex.inputs]
    args = [_argument(arg, storages) for arg in call.args]
    positional = [a for a, s in zip(args, op._schema.arguments, strict=True) if not s.kwarg_only]
    named = {s.name: a for a, s in zip(args, op._schema.arguments, strict=True) if s.kwarg_only}
    if over is not None:
        assert call.results[0] is not None
        op, out = _out_variant(op)
        named[out] = view(values[over], call.results[0].spec)
    try:
        returned = op(*positional, **named)
    except RuntimeError as error:
        raise ExecutionError(f"{where}: {error}") from error
    results = _flatten(returned)
    outputs = [torch.empty(size, dtype=torch.uint8) for size in vertex.sizes]
    for output, position in vertex.inplace:
        outputs[output] = storages[position]
    written_over = {output for output, _ in vertex.inplace}
    if over is not None:
        outputs[0] = values.pop(over)
        written_over.add(0)
    for tensor, result in zip(results, call.results, strict=True):
        if result is None or tensor is None:
            continue
        spec = result.spec
        got = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride()))
        if got != (spec.dtype, spec.shape, spec.stride) and not _differ_in_strides_of_nothing(got, spec):
            raise ExecutionError(f"{where}: captured as {spec}, returned {got}")
        if result.output not in written_over:
            view(outputs[result.output], spec).copy_(tensor)
    for output, storage in enumerate(outputs):
        values[vertex.id, output] = storage


def _differ_in_strides_of_nothing(got: tuple[str, tuple[int, ...], tuple[int, ...]], spec: TensorSpec) -> bool:
    """Whether only the strides of dimensions of length 1 differ, by which no element is found."""
    pairs = zip(spec.shape, spec.stride, got[2], strict=True)
    return got[:2] == (spec.dtype, spec.shape) and all(a == b for n, a, b in pairs if n != 1)


def _out_variant(op: Any) -> tuple[Any, str]:
    """The overload that writes into a tensor it is given, and the name of that argument."""
    wanted = [str(a.type) for a in op._schema.arguments]
    packet = op._overloadpacket
    for name in packet.overloads():
        arguments = getattr(packet, name)._schema.arguments
        outs = [a.name for a in arguments if a.is_out]
        if len(outs) == 1 and [str(a.type) for a in arguments if not a.is_out] == wanted:
            return getattr(packet, name), outs[0]
    raise ExecutionError(f"{op} has no out variant")


def _argument(arg: Arg, storages: list[torch.Tensor]) -> Any:
    if isinstance(arg, TensorArg):
        return view(storages[arg.input], arg.spec)
    if isinstance(arg, EnumArg):
        return torch.device(arg.value) if arg.kind == "device" else getattr(torch, arg.value)
    if isinstance(arg, tuple):
        return [_argument(item, storages) for item in arg]
    return arg


def _flatten(value: Any) -> list[torch.Tensor | None]:
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _flatten(item)]
    return [value] if isinstance(value, torch.Tensor) or value is None else []
