"""Puts updates of trained weights at the head of a captured step, as kernels of a host device or of the step's own.

Each weight becomes a value that changes over steps, of which every other vertex reads the last version. Kernels of the
host device write it at home; those of the step's own load weight, moments and gradient, and their results go home.
Weights are updated in the order of their first use, so that the forward of the first layer runs while the second is
updated. Where a weight has a master in float32, each piece takes three kernels:
its gradient in float32, the update of the master, the weight from the master. A gradient that clipping has left to the
update takes one more before them: its product with the coefficient.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from disco_accel.graph.spaces import Space, SpaceKind
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
    tensor_args,
)
from disco_accel.graph.traits import FOREIGN, HOST_UPDATED_STATE, STATE, Traits
from disco_accel.graph.values import handed_out_at_gate
from disco_accel.step.update.pending_update import AdamSettings, Changed, ParameterUpdate

PIECE = 1 << 21
"""Elements of a kernel at most, a multiple of 64: cut there, pieces have the bits of the whole tensor. Below 64 Ki
elements waking the threads takes longer than the arithmetic."""

_CHANGED = 3
"""Values that the kernel of an update writes over, its first inputs: weight or master, and moments. The gradient
follows, then the scalars."""

_HOST_LR = "float64"
"""Dtype of a learning rate for kernels of the host device."""

_HOST_MEMORY = 1 << 46
"""Bytes of the host device's arena: no limit, since nothing but scratch lies there."""


@dataclass(frozen=True, slots=True)
class _UpdateInputs:
    """INPUT ids of values that the kernels of one parameter's update use. ``weight`` is the captured step's own."""

    weight: int
    exp_avg: int
    exp_avg_sq: int
    gradient: int
    steps: int
    lr: int
    master: int | None
    coefficient: int | None

    @property
    def states(self) -> tuple[int, ...]:
        """Those that the update changes: weight, moments and master, as ``ParameterUpdate.changed``."""
        return self.weight, self.exp_avg, self.exp_avg_sq, *(() if self.master is None else (self.master,))


class Stage(enum.Enum):
    """The work of one kernel for a piece; without a master and a coefficient that is the update alone."""

    SCALE = enum.auto()
    CAST = enum.auto()
    UPDATE = enum.auto()
    ROUND = enum.auto()


@dataclass(frozen=True, slots=True)
class _UpdateKernel:
    """Vertex ``id`` does ``stage`` for elements ``begin`` to ``end`` of part ``part``, on the host or on the step's
    device."""

    id: int
    part: int
    begin: int
    end: int
    stage: Stage = Stage.UPDATE
    on_host: bool = True

    def run(self, part: ParameterUpdate) -> None:
        """Do it by hand, where the stages before have been done by the plan: it has kept no gradient."""
        if self.stage is Stage.UPDATE:
            part.update(self.begin, self.end)
        elif self.stage is Stage.ROUND:
            part.round(self.begin, self.end)


@dataclass(frozen=True)
class UpdatedStep:
    """``graph`` with updates at its head. ``inputs`` of each part; ``kernels``, those of the host
    device in the one order in which they run. ``device_lr``: dtype of the learning rate for the others."""

    graph: TaskGraph
    inputs: tuple[_UpdateInputs, ...]
    kernels: tuple[_UpdateKernel, ...]
    device_lr: str

    @property
    def on_device(self) -> frozenset[int]:
        """Numbers of the parts that the step's device updates."""
        return frozenset(kernel.part for kernel in self.kernels if not kernel.on_host)

    def left(self, done: int, at_home: Collection[int]) -> list[_UpdateKernel]:
        """The kernels that are left when ``done`` of the host device have run, and the states ``at_home`` that others
        change have their last version there."""
        own = [kernel for kernel in self.kernels if kernel.on_host][done:]
        for kernel in self.kernels:
            inputs = self.inputs[kernel.part]
            state = inputs.exp_avg if kernel.stage is Stage.UPDATE else inputs.weight
            if not kernel.on_host and state not in at_home:
                own.append(kernel)
        return own

    def states(self, homes: Sequence[Changed]) -> dict[int, torch.Tensor]:
        """By INPUT: the tensor in whose memory each value lies that the updates change."""
        return {
            vertex: tensor.detach()
            for inputs, changed in zip(self.inputs, homes, strict=True)
            for vertex, tensor in zip(inputs.states, changed, strict=True)
        }

    def foreign(self, parts: Sequence[ParameterUpdate]) -> dict[int, torch.Tensor]:
        """By INPUT: gradients, counts of steps, learning rates and coefficients, given to each step."""
        given: dict[int, torch.Tensor] = {}
        on_device = self.on_device
        for number, (inputs, part) in enumerate(zip(self.inputs, parts, strict=True)):
            lr = part.lr.to(getattr(torch, self.device_lr)) if number in on_device else part.lr
            given |= {inputs.gradient: part.gradient.detach(), inputs.steps: part.steps, inputs.lr: lr}
            if inputs.coefficient is not None:
                assert part.coefficient is not None
                given[inputs.coefficient] = part.coefficient
        return given


def with_updates(
    graph: TaskGraph,
    weights: Sequence[int],
    parts: Sequence[ParameterUpdate],
    on_device: Collection[int],
    device_lr: str,
) -> UpdatedStep:
    """Return ``graph`` with the update of the weight that INPUT ``weights[i]`` holds by ``parts[i]`` at its head.

    ``on_device``: numbers of the parts that the weights' own device updates, whose kernels take the learning rate as
    ``device_lr``.
    """
    return _Updates(graph, weights, parts, frozenset(on_device), device_lr).step()


class _Updates:
    def __init__(
        self,
        graph: TaskGraph,
        weights: Sequence[int],
        parts: Sequence[ParameterUpdate],
        on_device: frozenset[int],
        device_lr: str,
    ) -> None:
        self._graph, self._device_lr = graph, device_lr
        self._parts = dict(zip(weights, parts, strict=True))
        on_host = [device.id for device in graph.devices if device.is_host_device]
        self._host = on_host[0] if on_host else max(device.id for device in graph.devices) + 1
        self._fresh = max((vertex.id for vertex in graph.vertices), default=-1) + 1
        self._new_inputs: list[Vertex] = []
        self._vertices: list[Vertex] = []
        self._kernels: list[_UpdateKernel] = []
        self._numbers = {weight: number for number, weight in enumerate(weights)}
        device = {vertex.id: vertex.space for vertex in graph.vertices}
        self._own_device = {w: device[w] for w, number in self._numbers.items() if number in on_device}
        """Weight that its own device updates → that device."""
        self._calls: dict[int, OpCall] = {}
        self._last: dict[Ref, Ref] = {}
        """Weight → its version when all updates have run."""
        self._sizes: dict[Ref, int] = {(vertex.id, 0): vertex.sizes[0] for vertex in graph.vertices if vertex.sizes}
        self._scalars: dict[tuple[int, bool], int] = {}
        """A count of steps, a learning rate or a coefficient, by identity, and whether for the host → its INPUT."""
        self._copies: dict[int, Ref] = {}
        """INPUT of one for a device → its copy there."""

    def step(self) -> UpdatedStep:
        inputs = {weight: self._update(weight, part) for weight, part in self._in_order_of_use()}
        ends = tuple(ref[0] for ref in self._last.values())
        old_inputs, others = [], []
        for vertex in self._graph.vertices:
            if vertex.kind is VertexKind.INPUT:
                traits = self._place(vertex.id)[0] if vertex.id in self._parts else vertex.traits
                old_inputs.append(replace(vertex, traits=traits))
                continue
            reads = tuple(self._last.get(ref, ref) for ref in vertex.inputs)
            # When a forward returns, all weights are updated: whoever drops the step finds them whole.
            after = (*vertex.after, *ends) if handed_out_at_gate(vertex) else vertex.after
            same = reads == vertex.inputs and after == vertex.after
            others.append(vertex if same else replace(vertex, inputs=reads, after=tuple(dict.fromkeys(after))))
        spaces = (space for space in self._graph.spaces if not space.is_host_device)
        graph = replace(
            self._graph,
            spaces=(*spaces, Space(self._host, _HOST_MEMORY, kind=SpaceKind.HOST)),
            vertices=(*old_inputs, *self._new_inputs, *self._vertices, *others),
            ops={**self._graph.ops, **self._calls},
        )
        ordered = tuple(inputs[weight] for weight in self._parts)
        return UpdatedStep(graph, ordered, tuple(self._kernels), self._device_lr)

    def _in_order_of_use(self) -> Iterator[tuple[int, ParameterUpdate]]:
        first: dict[int, int] = {}
        for position, vertex in enumerate(self._graph.vertices):
            for producer, _ in vertex.inputs:
                first.setdefault(producer, position)
        for weight in sorted(self._parts, key=lambda weight: first.get(weight, len(self._graph.vertices))):
            yield weight, self._parts[weight]

    def _place(self, weight: int) -> tuple[Traits, int]:
        """The traits of a weight, its moments and its master, and the device that updates them."""
        own = self._own_device.get(weight)
        return (STATE, self._host) if own is None else (HOST_UPDATED_STATE, own)

    def _input(self, op: str, size: int, traits: Traits, device: int) -> int:
        self._sizes[self._fresh, 0] = size
        self._new_inputs.append(Vertex(self._fresh, VertexKind.INPUT, device, op, (), (size,), traits=traits))
        self._fresh += 1
        return self._fresh - 1

    def _scalar(self, op: str, tensor: torch.Tensor, nbytes: int, *, on_host: bool) -> int:
        key = id(tensor), on_host
        if key not in self._scalars:
            self._scalars[key] = self._input(op, nbytes, FOREIGN, self._host)
        return self._scalars[key]

    def _update(self, weight: int, part: ParameterUpdate) -> _UpdateInputs:
        kept, place, on_host = part.exp_avg.nbytes, self._place(weight), weight not in self._own_device
        lr = getattr(torch, _HOST_LR if on_host else self._device_lr).itemsize
        inputs = _UpdateInputs(
            weight,
            self._input("exp_avg", kept, *place),
            self._input("exp_avg_sq", kept, *place),
            self._input("gradient", part.parameter.nbytes, FOREIGN, self._host),
            self._scalar("steps", part.steps, part.steps.nbytes, on_host=on_host),
            self._scalar("lr", part.lr, lr, on_host=on_host),
            None if part.master is None else self._input("master", kept, *place),
            None
            if part.coefficient is None
            else self._scalar("coefficient", part.coefficient, part.coefficient.nbytes, on_host=on_host),
        )
        version: Ref = (weight, 0)
        updated = inputs.weight if inputs.master is None else inputs.master
        changed: list[Ref] = [(updated, 0), (inputs.exp_avg, 0), (inputs.exp_avg_sq, 0)]
        gradient: Ref = (inputs.gradient, 0)
        scalars: list[Ref] = [(inputs.steps, 0), (inputs.lr, 0)]
        coefficient = [] if inputs.coefficient is None else [(inputs.coefficient, 0)]
        if not on_host:
            gradient = self._copy_to(place[1], gradient)
            scalars, coefficient = ([self._scalar_on(place[1], s) for s, _ in each] for each in (scalars, coefficient))
        dtype, count = _dtype(part.parameter), part.parameter.numel()
        # On a device all at once: then homes have the first version or the last.
        step = PIECE if on_host else count
        lr_dtype = _HOST_LR if on_host else self._device_lr
        for begin in range(0, count, step):
            piece = (self._numbers[weight], begin, min(begin + step, count))
            spec, settings = TensorSpec(dtype, (piece[2] - begin,), (1,), begin), part.settings
            # What is made of the gradient holds the piece alone, from its begin on.
            wide, read, lies = spec, gradient, spec
            if part.coefficient is not None:
                lies = replace(spec, offset=0)
                call = _product(spec, _dtype(part.coefficient), lies)
                (read,) = self._kernel(piece, Stage.SCALE, (gradient, *coefficient), call, place[1])
            if part.master is not None:
                wide, alone = replace(spec, dtype="float32"), replace(spec, dtype="float32", offset=0)
                (read,) = self._kernel(piece, Stage.CAST, (read,), _cast(lies, alone), place[1])
                lies = alone
            call = _call(settings, wide, lies, lr_dtype)
            changed = self._kernel(piece, Stage.UPDATE, (*changed, read, *scalars), call, place[1])
            if part.master is not None:
                (version,) = self._kernel(piece, Stage.ROUND, (version, changed[0]), _copy(spec, wide), place[1])
        self._last[weight, 0] = changed[0] if part.master is None else version
        return inputs

    def _copy_to(self, device: int, value: Ref) -> Ref:
        """Add a copy of an input in the host's memory."""
        size = self._sizes[value]
        copy = Vertex(self._fresh, VertexKind.COPY, device, "to_device", (value,), (size,), source=self._host)
        self._fresh += 1
        self._vertices.append(copy)
        return copy.id, 0

    def _scalar_on(self, device: int, scalar: int) -> Ref:
        if scalar not in self._copies:
            self._copies[scalar] = self._copy_to(device, (scalar, 0))
        return self._copies[scalar]

    def _kernel(
        self, piece: tuple[int, int, int], stage: Stage, inputs: tuple[Ref, ...], call: OpCall, device: int
    ) -> list[Ref]:
        """The results of a kernel for ``piece``, its part, begin and end: the first of ``inputs`` anew, or another
        gradient."""
        if stage in (Stage.SCALE, Stage.CAST):
            (result,) = call.results
            assert result is not None
            sizes, over = [_bytes(result.spec)], 0
        else:
            over = _CHANGED if stage is Stage.UPDATE else 1
            sizes = [self._sizes[state] for state in inputs[:over]]
        on_host = device == self._host
        last = next((k.id for k in reversed(self._kernels) if k.on_host), None) if on_host else None
        kernel = Vertex(
            self._fresh,
            VertexKind.KERNEL,
            device,
            call.name,
            inputs,
            tuple(sizes),
            # One after the other, as the processors run them anyway: so many have run, so many parts are done.
            after=() if last is None else (last,),
            inplace=tuple((k, k) for k in range(over)),
        )
        self._fresh += 1
        self._vertices.append(kernel)
        self._kernels.append(_UpdateKernel(kernel.id, *piece, stage, on_host))
        self._calls[kernel.id] = call
        made = [(kernel.id, k) for k in range(len(sizes))]
        self._sizes.update(zip(made, sizes, strict=True))
        return made


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _call(settings: AdamSettings, spec: TensorSpec, of_gradient: TensorSpec, lr_dtype: str) -> OpCall:
    """The kernel on a piece ``spec`` of weight or master and moments (inputs 0 to 2) and on a gradient (3); 4: steps,
    5: the rate."""
    weight, exp_avg, exp_avg_sq = (TensorArg(position, spec) for position in range(_CHANGED))
    steps, lr = TensorArg(4, TensorSpec("float32", (), ())), TensorArg(5, TensorSpec(lr_dtype, (), ()))
    gradient = TensorArg(3, of_gradient)
    lists: tuple[Arg, ...] = ((weight,), (gradient,), (exp_avg,), (exp_avg_sq,), (), (steps,))
    numbers: tuple[Arg, ...] = (settings.beta1, settings.beta2, settings.weight_decay, settings.eps)
    switches: tuple[Arg, ...] = (False, settings.maximize, None, None)
    return OpCall(settings.op, "tensor_lr", (*lists, lr, *numbers, *switches), (), module="optimizer")


def _product(spec: TensorSpec, coefficient: str, result: TensorSpec) -> OpCall:
    """A piece ``spec`` (input 0) times a coefficient of that dtype (1)."""
    args = (TensorArg(0, spec), TensorArg(1, TensorSpec(coefficient, (), ())))
    return OpCall("aten::mul", "Tensor", args, (OpResult(0, result),), module="optimizer")


def _cast(spec: TensorSpec, result: TensorSpec) -> OpCall:
    """A piece ``spec`` in the dtype of ``result``."""
    args = (TensorArg(0, spec), EnumArg("dtype", result.dtype), None, None, None, False, None)
    return OpCall("aten::_to_copy", "default", args, (OpResult(0, result),), module="optimizer")


def _copy(spec: TensorSpec, source: TensorSpec) -> OpCall:
    """A piece ``spec`` (input 0) gets the values of a piece of another dtype (1)."""
    args = (TensorArg(0, spec), TensorArg(1, source), False)
    return OpCall("aten::copy_", "default", args, (None,), module="optimizer")


def samples(step: UpdatedStep) -> tuple[TaskGraph, dict[int, int]]:
    """A graph to measure instead of ``step``'s, and by kernel of the update the one in it that takes as long.

    One kernel stands for all of a size on one device. Its values have that size alone: a weight may be as large as the
    host's memory allows.
    """
    of_step = {vertex.id: vertex for vertex in step.graph.vertices}
    vertices: list[Vertex] = []
    calls: dict[int, OpCall] = {}
    sample: dict[tuple[int, OpCall], int] = {}
    stands_for: dict[int, int] = {}
    for kernel in step.kernels:
        call, over = _at_begin(step.graph.ops[kernel.id]), of_step[kernel.id].inplace
        device = of_step[kernel.id].space
        if (device, call) not in sample:
            read = {arg.input: _bytes(arg.spec) for arg in tensor_args(call.args)}
            inputs = []
            for position in range(len(read)):
                inputs.append((len(vertices), 0))
                traits = STATE if any(position == written for _, written in over) else FOREIGN
                size = read[position]
                vertices.append(Vertex(len(vertices), VertexKind.INPUT, device, sizes=(size,), traits=traits))
            sizes = tuple(read[written] for _, written in over) or of_step[kernel.id].sizes
            made = Vertex(len(vertices), VertexKind.KERNEL, device, call.name, tuple(inputs), sizes, inplace=over)
            vertices.append(made)
            calls[made.id] = call
            sample[device, call] = made.id
        stands_for[kernel.id] = sample[device, call]
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
