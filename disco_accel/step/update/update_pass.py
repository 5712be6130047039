"""Puts updates of trained weights at the head of a captured step, as kernels of a host device.

Each weight becomes a value that changes over steps; the kernels that update it write its new version at home, and
every other vertex reads the last. Weights are updated in the order of their first use, so that the forward of the
first layer runs while the second is updated. Where a weight has a master in float32, each piece takes three kernels:
its gradient in float32, the update of the master, the weight from the master.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from disco_accel.graph.taskgraph import (
    Arg,
    Device,
    EnumArg,
    OpCall,
    OpResult,
    Ref,
    TaskGraph,
    TensorArg,
    TensorSpec,
    Vertex,
    VertexKind,
    tensor_args,
)
from disco_accel.graph.traits import FOREIGN, STATE
from disco_accel.graph.values import handed_out_at_gate
from disco_accel.step.update.pending_update import AdamSettings, Changed, ParameterUpdate

PIECE = 1 << 21
"""Elements of a kernel at most, a multiple of 64: cut there, pieces have the bits of the whole tensor. Below 64 Ki
elements waking the threads takes longer than the arithmetic."""

_CHANGED = 3
"""Values that the kernel of an update writes over, its first inputs: weight or master, and moments. The gradient
follows, then the scalars."""

_HOST_MEMORY = 1 << 46
"""Bytes of the host device's arena: no limit, since nothing but scratch lies there."""


@dataclass(frozen=True, slots=True)
class UpdateInputs:
    """INPUT ids of what the kernels of one parameter's update use. ``weight`` is the captured step's own."""

    weight: int
    exp_avg: int
    exp_avg_sq: int
    gradient: int
    steps: int
    lr: int
    master: int | None

    @property
    def states(self) -> tuple[int, ...]:
        """Those that the update changes: weight, moments and master, as ``ParameterUpdate.changed``."""
        return self.weight, self.exp_avg, self.exp_avg_sq, *(() if self.master is None else (self.master,))


class Stage(enum.Enum):
    """What one kernel does for a piece; without a master that is the update alone."""

    CAST = enum.auto()
    UPDATE = enum.auto()
    ROUND = enum.auto()


@dataclass(frozen=True, slots=True)
class UpdateKernel:
    """Vertex ``id`` does ``stage`` for elements ``begin`` to ``end`` of part ``part``."""

    id: int
    part: int
    begin: int
    end: int
    stage: Stage = Stage.UPDATE

    def run(self, part: ParameterUpdate) -> None:
        """Do it by hand, where the stages before have been done by the plan: it has kept no cast gradient."""
        if self.stage is Stage.UPDATE:
            part.update(self.begin, self.end)
        elif self.stage is Stage.ROUND:
            part.round(self.begin, self.end)


@dataclass(frozen=True)
class UpdatedStep:
    """``graph`` with updates at its head. ``inputs`` of each part; ``kernels`` in the one order in which they run."""

    graph: TaskGraph
    inputs: tuple[UpdateInputs, ...]
    kernels: tuple[UpdateKernel, ...]

    @property
    def ids(self) -> frozenset[int]:
        """Of ``kernels``."""
        return frozenset(kernel.id for kernel in self.kernels)

    def states(self, homes: Sequence[Changed]) -> dict[int, torch.Tensor]:
        """By INPUT: the tensor in whose memory each value lies that the updates change."""
        return {
            vertex: tensor.detach()
            for inputs, changed in zip(self.inputs, homes, strict=True)
            for vertex, tensor in zip(inputs.states, changed, strict=True)
        }

    def foreign(self, parts: Sequence[ParameterUpdate]) -> dict[int, torch.Tensor]:
        """By INPUT: gradients, counts of steps and learning rates, given to each step."""
        given: dict[int, torch.Tensor] = {}
        for inputs, part in zip(self.inputs, parts, strict=True):
            given |= {inputs.gradient: part.gradient.detach(), inputs.steps: part.steps, inputs.lr: part.lr}
        return given


def with_updates(graph: TaskGraph, weights: Sequence[int], parts: Sequence[ParameterUpdate]) -> UpdatedStep:
    """Return ``graph`` with the update of the weight that INPUT ``weights[i]`` holds by ``parts[i]`` at its head."""
    return _Updates(graph, weights, parts).step()


class _Updates:
    def __init__(self, graph: TaskGraph, weights: Sequence[int], parts: Sequence[ParameterUpdate]) -> None:
        self._graph = graph
        self._parts = dict(zip(weights, parts, strict=True))
        self._host = max(device.id for device in graph.devices) + 1
        self._fresh = max((vertex.id for vertex in graph.vertices), default=-1) + 1
        self._new_inputs: list[Vertex] = []
        self._vertices: list[Vertex] = []
        self._kernels: list[UpdateKernel] = []
        self._numbers = {weight: number for number, weight in enumerate(weights)}
        self._calls: dict[int, OpCall] = {}
        self._last: dict[Ref, Ref] = {}
        """Weight → its version when all updates have run."""
        self._sizes: dict[Ref, int] = {(vertex.id, 0): vertex.sizes[0] for vertex in graph.vertices if vertex.sizes}
        self._scalars: dict[int, int] = {}
        """Address of a count of steps or a learning rate → its INPUT."""

    def step(self) -> UpdatedStep:
        inputs = {weight: self._update(weight, part) for weight, part in self._in_order_of_use()}
        ends = tuple(ref[0] for ref in self._last.values())
        old_inputs, others = [], []
        for vertex in self._graph.vertices:
            if vertex.kind is VertexKind.INPUT:
                old_inputs.append(replace(vertex, traits=STATE) if vertex.id in self._parts else vertex)
                continue
            reads = tuple(self._last.get(ref, ref) for ref in vertex.inputs)
            # When a forward returns, all weights are updated: whoever drops the step finds them whole.
            after = (*vertex.after, *ends) if handed_out_at_gate(vertex) else vertex.after
            same = reads == vertex.inputs and after == vertex.after
            others.append(vertex if same else replace(vertex, inputs=reads, after=tuple(dict.fromkeys(after))))
        graph = replace(
            self._graph,
            devices=(*self._graph.devices, Device(self._host, _HOST_MEMORY, host=True)),
            vertices=(*old_inputs, *self._new_inputs, *self._vertices, *others),
            ops={**self._graph.ops, **self._calls},
        )
        return UpdatedStep(graph, tuple(inputs[weight] for weight in self._parts), tuple(self._kernels))

    def _in_order_of_use(self) -> Iterator[tuple[int, ParameterUpdate]]:
        first: dict[int, int] = {}
        for position, vertex in enumerate(self._graph.vertices):
            for producer, _ in vertex.inputs:
                first.setdefault(producer, position)
        for weight in sorted(self._parts, key=lambda weight: first.get(weight, len(self._graph.vertices))):
            yield weight, self._parts[weight]

    def _input(self, op: str, size: int, *, state: bool) -> int:
        traits = STATE if state else FOREIGN
        self._sizes[self._fresh, 0] = size
        self._new_inputs.append(Vertex(self._fresh, VertexKind.INPUT, self._host, op, (), (size,), traits=traits))
        self._fresh += 1
        return self._fresh - 1

    def _scalar(self, op: str, tensor: torch.Tensor) -> int:
        key = id(tensor)
        if key not in self._scalars:
            self._scalars[key] = self._input(op, tensor.nbytes, state=False)
        return self._scalars[key]

    def _update(self, weight: int, part: ParameterUpdate) -> UpdateInputs:
        nbytes, kept = part.parameter.nbytes, part.exp_avg.nbytes
        inputs = UpdateInputs(
            weight,
            self._input("exp_avg", kept, state=True),
            self._input("exp_avg_sq", kept, state=True),
            self._input("gradient", nbytes, state=False),
            self._scalar("steps", part.steps),
            self._scalar("lr", part.lr),
            None if part.master is None else self._input("master", kept, state=True),
        )
        version: Ref = (weight, 0)
        updated = inputs.weight if inputs.master is None else inputs.master
        changed: list[Ref] = [(updated, 0), (inputs.exp_avg, 0), (inputs.exp_avg_sq, 0)]
        gradient: Ref = (inputs.gradient, 0)
        scalars: list[Ref] = [(inputs.steps, 0), (inputs.lr, 0)]
        dtype, count = _dtype(part.parameter), part.parameter.numel()
        for begin in range(0, count, PIECE):
            piece = (self._numbers[weight], begin, min(begin + PIECE, count))
            spec, settings = TensorSpec(dtype, (piece[2] - begin,), (1,), begin), part.settings
            if part.master is None:
                changed = self._kernel(piece, Stage.UPDATE, (*changed, gradient, *scalars), _call(settings, spec, spec))
                continue
            # Of the piece alone, from its begin on.
            wide, alone = replace(spec, dtype="float32"), replace(spec, dtype="float32", offset=0)
            cast = self._kernel(piece, Stage.CAST, (gradient,), _cast(spec, alone))
            changed = self._kernel(piece, Stage.UPDATE, (*changed, *cast, *scalars), _call(settings, wide, alone))
            (version,) = self._kernel(piece, Stage.ROUND, (version, changed[0]), _copy(spec, wide))
        self._last[weight, 0] = changed[0] if part.master is None else version
        return inputs

    def _kernel(self, piece: tuple[int, int, int], stage: Stage, inputs: tuple[Ref, ...], call: OpCall) -> list[Ref]:
        """What a kernel for ``piece`` makes, its part, begin and end: the first of ``inputs`` anew, or a cast."""
        if stage is Stage.CAST:
            (result,) = call.results
            assert result is not None
            sizes, over = [_bytes(result.spec)], 0
        else:
            over = _CHANGED if stage is Stage.UPDATE else 1
            sizes = [self._sizes[state] for state in inputs[:over]]
        # One after the other, as the processors run them anyway: so many have run, so many parts are done.
        after = (self._kernels[-1].id,) if self._kernels else ()
        kernel = Vertex(
            self._fresh,
            VertexKind.KERNEL,
            self._host,
            call.name,
            inputs,
            tuple(sizes),
            after=after,
            inplace=tuple((k, k) for k in range(over)),
        )
        self._fresh += 1
        self._vertices.append(kernel)
        self._kernels.append(UpdateKernel(kernel.id, *piece, stage))
        self._calls[kernel.id] = call
        made = [(kernel.id, k) for k in range(len(sizes))]
        self._sizes.update(zip(made, sizes, strict=True))
        return made


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _call(settings: AdamSettings, spec: TensorSpec, of_gradient: TensorSpec) -> OpCall:
    """The kernel on a piece ``spec`` of weight or master and moments (inputs 0 to 2) and on a gradient (3); 4: steps,
    5: the rate."""
    weight, exp_avg, exp_avg_sq = (TensorArg(position, spec) for position in range(_CHANGED))
    steps, lr = TensorArg(4, TensorSpec("float32", (), ())), TensorArg(5, TensorSpec("float64", (), ()))
    gradient = TensorArg(3, of_gradient)
    lists: tuple[Arg, ...] = ((weight,), (gradient,), (exp_avg,), (exp_avg_sq,), (), (steps,))
    numbers: tuple[Arg, ...] = (settings.beta1, settings.beta2, settings.weight_decay, settings.eps)
    switches: tuple[Arg, ...] = (False, settings.maximize, None, None)
    return OpCall(settings.op, "tensor_lr", (*lists, lr, *numbers, *switches), (), module="optimizer")


def _cast(spec: TensorSpec, result: TensorSpec) -> OpCall:
    """A piece ``spec`` in the dtype of ``result``."""
    args = (TensorArg(0, spec), EnumArg("dtype", result.dtype), None, None, None, False, None)
    return OpCall("aten::_to_copy", "default", args, (OpResult(0, result),), module="optimizer")


def _copy(spec: TensorSpec, source: TensorSpec) -> OpCall:
    """A piece ``spec`` (input 0) becomes what a piece of another dtype holds (1)."""
    args = (TensorArg(0, spec), TensorArg(1, source), False)
    return OpCall("aten::copy_", "default", args, (None,), module="optimizer")


def samples(step: UpdatedStep) -> tuple[TaskGraph, dict[int, int]]:
    """A graph to measure instead of ``step``'s, and by kernel of the update the one in it that takes as long: one for
    all pieces of a size, on values of that size alone, since a weight may be as large as the host's memory allows."""
    host = step.graph.devices[-1]
    of_step = {vertex.id: vertex for vertex in step.graph.vertices}
    vertices: list[Vertex] = []
    calls: dict[int, OpCall] = {}
    sample: dict[OpCall, int] = {}
    stands_for: dict[int, int] = {}
    for kernel in step.kernels:
        call, over = _at_begin(step.graph.ops[kernel.id]), of_step[kernel.id].inplace
        if call not in sample:
            read = {arg.input: _bytes(arg.spec) for arg in tensor_args(call.args)}
            inputs = []
            for position in range(len(read)):
                inputs.append((len(vertices), 0))
                traits = STATE if any(position == written for _, written in over) else FOREIGN
                size = read[position]
                vertices.append(Vertex(len(vertices), VertexKind.INPUT, host.id, sizes=(size,), traits=traits))
            sizes = tuple(read[written] for _, written in over) or of_step[kernel.id].sizes
            made = Vertex(len(vertices), VertexKind.KERNEL, host.id, call.name, tuple(inputs), sizes, inplace=over)
            vertices.append(made)
            calls[made.id] = call
            sample[call] = made.id
        stands_for[kernel.id] = sample[call]
    return TaskGraph("updates", step.graph.devices, tuple(vertices), calls), stands_for


def _bytes(spec: TensorSpec) -> int:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return math.prod(spec.shape) * dtype.itemsize


def _at_begin(call: OpCall) -> OpCall:
    """``call`` on the first elements of its values."""

    def moved(arg: Arg) -> Arg:
        if isinstance(arg, TensorArg):
            return replace(arg, spec=replace(arg.spec, offset=0))
        return tuple(moved(each) for each in arg) if isinstance(arg, tuple) else arg

    return replace(call, args=tuple(moved(arg) for arg in call.args))
