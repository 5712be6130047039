"""FX trace → TaskGraph: one KERNEL per aten op that makes or changes a storage, no vertex for a view."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from disco_accel.capture.inplace import overwritable
from disco_accel.capture.rng import draws
from disco_accel.capture.storages import storage_bytes, storage_key, tensor_spec, tensors_of, written_storages
from disco_accel.capture.trace_log import RECOMPUTE, NodeInfo, arguments_of, node_info
from disco_accel.errors import CaptureError
from disco_accel.graph.op_traits import op_traits
from disco_accel.graph.passes import GraphPass
from disco_accel.graph.taskgraph import (
    Arg,
    EnumArg,
    OpCall,
    OpResult,
    Ref,
    RngSite,
    TaskGraph,
    TensorArg,
    Vertex,
    VertexKind,
)
from disco_accel.graph.traits import Traits
from disco_accel.graph.values import arrives_at_gate
from disco_accel.native.op_encoding import op_overload


@dataclass
class _Accesses:
    """The kernels so far that have touched an input which kernels change in place: the last ``writer``, and the
    ``readers`` since."""

    writer: int = -1
    readers: list[int] = field(default_factory=list)


@dataclass
class OpLowering:
    """Vertices made so far. ``owner``: storage → the value it holds now; ``maker``: storage → its first value.

    ``device``: where all kernels run; devices that the traced code names do not count. ``outside``: a clone → the
    external INPUT whose memory it is made in. ``copied_outside``: the values that tell of it. ``changed_inputs``: those
    that kernels change in place, in eager's order.
    """

    device: str = "cpu"
    vertices: list[Vertex] = field(default_factory=list)
    ops: dict[int, OpCall] = field(default_factory=dict)
    infos: dict[int, NodeInfo] = field(default_factory=dict)
    owner: dict[int, Ref] = field(default_factory=dict)
    maker: dict[int, Ref] = field(default_factory=dict)
    outside: dict[fx.Node, int] = field(default_factory=dict)
    copied_outside: list[Ref] = field(default_factory=list)
    changed_inputs: dict[int, _Accesses] = field(default_factory=dict)

    def ref(self, tensor: torch.Tensor) -> Ref:
        """The value behind ``tensor`` at this point of the trace."""
        return self.owner[storage_key(tensor)]

    def order(self, vertex: int, inputs: Iterable[Ref], written: int | None = None) -> tuple[int, ...]:
        """The kernels that ``vertex``, about to be made, has to wait for, as it reads ``inputs`` that are changed in
        place and changes the input ``written``."""
        after: set[int] = set()
        for input_, _ in inputs:
            accesses = self.changed_inputs.get(input_)
            if accesses is None:
                continue
            if accesses.writer >= 0:
                after.add(accesses.writer)
            if input_ == written:
                after.update(accesses.readers)
                accesses.writer, accesses.readers = vertex, []
            else:
                accesses.readers.append(vertex)
        return tuple(sorted(after))

    def change(self, input_: int) -> None:
        """Kernels may change this input in place."""
        self.changed_inputs[input_] = _Accesses()

    def add_input(self, tensor: torch.Tensor, op: str, traits: Traits) -> int:
        """An INPUT vertex for the storage of ``tensor``; returns its id."""
        id_ = len(self.vertices)
        self.vertices.append(Vertex(id_, VertexKind.INPUT, 0, op, sizes=(storage_bytes(tensor),), traits=traits))
        key = storage_key(tensor)
        self.owner[key] = self.maker[key] = (id_, 0)
        return id_


def remove_unread(graph: fx.Graph) -> None:
    """Remove nodes whose results nobody reads, as ``eliminate_dead_code`` does, without its check of the graph."""
    for node in reversed(graph.nodes):
        if not node.users and not _must_stay(node):
            graph.erase_node(node)


def _must_stay(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    # Eager draws the numbers that nobody reads too.
    return draws(node) or (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable)


def used_inputs(graph: fx.Graph) -> list[fx.Node]:
    """Placeholders and constants that something reads, placeholders first."""
    order = ("placeholder", "get_attr")
    return [node for op in order for node in graph.nodes if node.op == op and node.users]


def lower_ops(graph: fx.Graph, low: OpLowering, sites: Mapping[fx.Node, RngSite] = MappingProxyType({})) -> None:
    """Append one KERNEL per op of ``graph``; every placeholder and constant it reads must be an INPUT already.

    ``sites``: the nodes that draw random numbers.

    Raises:
        CaptureError: an op whose effect a TaskGraph cannot say; names op and module.
    """
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or node.target is operator.getitem:
            continue
        if node in low.outside:
            _lower_copy_outside(node, low)
            continue
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            raise CaptureError(f"{target} in module {node_info(node).module or '?'} is not an aten op")
        # In place these only look at a tensor otherwise, as unsqueeze_ and t_ do.
        reshapes = torch.Tag.inplace_view in target.tags and not op_traits(target._schema.name).resizes
        if reshapes and _is_view(node, low):
            continue
        if target._schema.is_mutable or not _is_view(node, low):
            _lower_kernel(node, target, low, sites.get(node))


def _lower_copy_outside(node: fx.Node, low: OpLowering) -> None:
    """A clone becomes a copy into memory of the caller's, of which a byte in the arena tells that it was made."""
    target = torch.ops.aten.copy_.default
    (source,) = node.args
    assert node.target is torch.ops.aten.clone.default and isinstance(source, fx.Node)
    inputs: list[Ref] = []
    args = tuple(_lower_arg(value, low, inputs, str(target)) for value in (node, source, False))
    id_, info = len(low.vertices), node_info(node)
    vertex = Vertex(id_, VertexKind.KERNEL, 0, target._schema.name, tuple(inputs), sizes=(1,), out=True, keep=True)
    low.vertices.append(replace(vertex, after=low.order(id_, inputs)))
    low.copied_outside.append((id_, 0))
    low.ops[id_] = OpCall(target._schema.name, target._overloadname, args, (None,), info.module)
    low.infos[id_] = info


def _in_place(source: str) -> str:
    if source != "buffer":
        return f"({source}) in place; let it change a clone"
    return (
        "(buffer) in place, as batch normalization does with its running statistics; put that module in eval mode "
        "after model.train(), or build it with track_running_stats=False"
    )


def _is_view(node: fx.Node, low: OpLowering) -> bool:
    tensors = [t for t in tensors_of(node.meta.get("val")) if t is not None]
    return bool(tensors) and all(storage_key(t) in low.owner for t in tensors)


def _lower_kernel(node: fx.Node, target: torch._ops.OpOverload, low: OpLowering, rng: RngSite | None) -> None:
    info = node_info(node)
    where = f"{target} in module {info.module or '?'}"
    target = _implemented_by(target)
    inputs: list[Ref] = []
    args = _arguments(node, target, low, inputs, where)
    id_ = len(low.vertices)
    written = written_storages(node, target)
    sizes: list[int] = []
    inplace: tuple[tuple[int, int], ...] = ()
    if written:
        if len(written) > 1:
            raise CaptureError(f"{where} writes into {len(written)} tensors; only one can be captured")
        key, size = written.popitem()
        if low.owner[key][0] in low.changed_inputs:
            _lower_change(target, low, args, inputs, low.owner[key][0], info)
            return
        if low.vertices[low.owner[key][0]].kind is VertexKind.INPUT:
            raise CaptureError(f"{where} changes an input of the step {_in_place(low.vertices[low.owner[key][0]].op)}")
        inplace = ((0, inputs.index(low.owner[key])),)
        sizes.append(size)
        low.owner[key] = (id_, 0)
    results = _results(node, low, id_, sizes, where)
    if not sizes:
        raise CaptureError(f"{where} returns no tensor")
    name = target._schema.name
    call = OpCall(name, target._overloadname, args, results, info.module, rng)
    low.vertices.append(
        Vertex(
            id=id_,
            kind=VertexKind.KERNEL,
            space=0,
            op=name,
            inputs=tuple(inputs),
            sizes=tuple(sizes),
            inplace=inplace,
            after=low.order(id_, inputs),
            may_inplace=() if inplace else overwritable(tuple(inputs), tuple(sizes), call, low.vertices),
        )
    )
    low.ops[id_] = call
    low.infos[id_] = info


def _lower_change(
    target: torch._ops.OpOverload,
    low: OpLowering,
    args: tuple[Arg, ...],
    inputs: Sequence[Ref],
    changed: int,
    info: NodeInfo,
) -> None:
    """A call that changes the input ``changed`` where it lies; a byte in the arena tells that it has."""
    id_, name = len(low.vertices), target._schema.name
    after = low.order(id_, inputs, changed)
    low.vertices.append(
        Vertex(id_, VertexKind.KERNEL, 0, name, tuple(inputs), sizes=(1,), out=True, keep=True, after=after)
    )
    results = (None,) * len(target._schema.returns)
    low.ops[id_] = OpCall(name, target._overloadname, args, results, info.module)
    low.infos[id_] = info


def _implemented_by(target: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """The overload that ATen calls for ``target``: itself, or one that has a native out overload."""
    same = op_traits(target._schema.name).same_calls.get(target._overloadname)
    return target if same is None else op_overload(*same)


def _results(node: fx.Node, low: OpLowering, id_: int, sizes: list[int], where: str) -> tuple[OpResult | None, ...]:
    read = _read_results(node)
    results: list[OpResult | None] = []
    for index, tensor in enumerate(tensors_of(node.meta["val"])):
        if tensor is None:
            results.append(None)
            continue
        key = storage_key(tensor)
        if key not in low.owner:
            low.owner[key] = low.maker[key] = (id_, len(sizes))
            sizes.append(storage_bytes(tensor))
        vertex, output = low.owner[key]
        if vertex == id_:
            results.append(OpResult(output, tensor_spec(tensor)))
        elif index in read:
            raise CaptureError(f"{where}: result {index} shares memory with an earlier tensor, others do not")
        else:
            results.append(None)
    return tuple(results)


def _read_results(node: fx.Node) -> set[int]:
    if not isinstance(node.meta["val"], (tuple, list)):
        return {0} if node.users else set()
    return {int(user.args[1]) for user in node.users if user.target is operator.getitem}  # type: ignore[arg-type]


def _arguments(
    node: fx.Node, target: torch._ops.OpOverload, low: OpLowering, inputs: list[Ref], where: str
) -> tuple[Arg, ...]:
    """All arguments in schema order, defaults filled in; refs of the tensors among them go to ``inputs``."""
    return tuple(
        _lower_arg(value, low, inputs, f"{where}, argument {name}")
        for name, value in arguments_of(node, target).items()
    )


def _lower_arg(value: Any, low: OpLowering, inputs: list[Ref], where: str) -> Arg:
    if isinstance(value, fx.Node):
        tensor = value.meta.get("val")
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError(f"{where}: depends on the data, not only on shapes")
        ref = low.ref(tensor)
        if ref not in inputs:
            inputs.append(ref)
        return TensorArg(inputs.index(ref), tensor_spec(tensor))
    if isinstance(value, (list, tuple)):
        return tuple(_lower_arg(item, low, inputs, where) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    for kind, class_ in (
        ("dtype", torch.dtype),
        ("layout", torch.layout),
        ("device", torch.device),
        ("memory_format", torch.memory_format),
    ):
        if isinstance(value, class_):
            return EnumArg(kind, low.device if kind == "device" else str(value).removeprefix("torch."))
    raise CaptureError(f"{where}: a {type(value).__name__} cannot be captured")


def hold_back(low: OpLowering, output_grads: Mapping[int, Iterable[torch.Tensor]]) -> GraphPass:
    """The pass that makes work of the backward that needs only forward values wait for its turn.

    A runtime that starts every ready vertex would run it in the forward, where its results fill memory. For
    recomputation that undoes checkpointing. A recomputed kernel waits for the gradient of its layer's output
    (``output_grads``), others for the kernel before them in serial order. Only roots need the edge: vertices that
    follow them by data wait too.
    """
    gates = {
        layer: {low.maker[storage_key(grad)][0] for grad in grads if storage_key(grad) in low.maker}
        for layer, grads in output_grads.items()
    }

    def held_back(graph: TaskGraph) -> TaskGraph:
        held = {v.id for v in graph.vertices if arrives_at_gate(v)}
        vertices = list(graph.vertices)
        previous = -1
        for position, vertex in enumerate(graph.vertices):
            if vertex.kind is VertexKind.INPUT:
                continue
            if not any(maker in held for maker, _ in vertex.inputs):
                if previous < 0:
                    continue
                info = low.infos[vertex.id]
                known = gates.get(info.layer, set()) if info.phase == RECOMPUTE else set()
                after = sorted(g for g in known if g < vertex.id) or [previous]
                vertices[position] = replace(vertex, after=tuple(after))
            held.add(vertex.id)
            previous = vertex.id
        return replace(graph, vertices=tuple(vertices))

    return GraphPass("hold back", "recomputation and the like wait for the backward", held_back)


def mark(low: OpLowering, ref: Ref, **flags: bool) -> None:
    """Set flags such as ``out`` or ``keep`` on the vertex behind ``ref``."""
    low.vertices[ref[0]] = replace(low.vertices[ref[0]], **flags)  # type: ignore[arg-type]
