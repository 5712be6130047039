"""One step of a decoder whose weights are all trained, as a task graph on one device: which pieces, made by whom.

A layer's weights are cut into pieces of equal size. Micro-batches follow each other; gradients are added up on the
device. Activations are recomputed. The study's seconds are spread over the layers by their parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from benchmarks.optimizer.study import GRADIENT, STATE, WEIGHT, Study
from benchmarks.optimizer.update_order import UPDATE, updates_after_gradients
from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import PER_STEP, Traits
from disco_accel.graph.traits import STATE as CHANGES

KEEP = "keep on the host"
"""Writes what the host needs in the next step to its home there."""
FORWARD, BACKWARD = ("embed", "forward", "loss"), ("recompute", "weight gradient", "input gradient")

SAVED = 34
"""Bytes a token and hidden unit that the backward of a layer reads (Korthikanti et al., 2022, flash attention)."""

_SCALAR = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a layer's weights; layer 0 is the embedding, the last one the output layer."""

    number: int
    layer: int
    parameters: int


@dataclass(frozen=True, slots=True)
class StepOptions:
    """``pieces``: of a layer. ``clip``: no update starts before the norm of all gradients is known. The others are
    numbers of pieces. ``deferred``: their updates run at the head of the next step, in the order in which the forward
    needs them. ``on_host``: those that the processors will update; of deferred ones their gradients go to the host, the
    others' stay. ``stays``: their state never leaves the device, nor do weights and deferred gradients of any piece
    that it updates; None: a planner decides."""

    pieces: int = 3
    clip: bool = False
    deferred: Collection[int] = ()
    on_host: Collection[int] = ()
    stays: Collection[int] | None = None


def pieces_of(study: Study, per_layer: int) -> list[Piece]:
    """In the order of the forward."""
    model = study.model
    rest = model.layer - per_layer * (model.layer // per_layer)
    found = [(0, model.table)]
    for layer in range(1, model.layers + 1):
        found += [(layer, model.layer // per_layer + (rest if not part else 0)) for part in range(per_layer)]
    found.append((model.layers + 1, model.table + model.hidden))
    return [Piece(number, layer, parameters) for number, (layer, parameters) in enumerate(found)]


def step_graph(study: Study, options: StepOptions) -> TaskGraph:
    """Return the step, all kernels on device 0, updates as kernels there over values that live over steps."""
    maker = _Step(study, options)
    maker.inputs()
    maker.updates(maker.kept, maker.kept_norm)
    for micro_batch in range(study.model.accumulation):
        maker.forward()
        maker.backward(first=not micro_batch, last=micro_batch + 1 == study.model.accumulation)
    norms = maker.norm() if options.clip else {}
    # By arrival: without clipping each starts as soon as its gradient is there.
    maker.updates({number: made for number, made in maker.gradients.items() if number not in options.deferred}, norms)
    graph = TaskGraph("optimizer step", (Space(0, study.machine.memory),), tuple(maker.vertices))
    return graph if options.clip else updates_after_gradients(graph)


class _Step:
    def __init__(self, study: Study, options: StepOptions) -> None:
        self.study, self.options, self.model = study, options, study.model
        self.pieces = pieces_of(study, options.pieces)
        self.by_layer: list[list[Piece]] = [[] for _ in range(self.model.layers + 2)]
        for piece in self.pieces:
            self.by_layer[piece.layer].append(piece)
        self.vertices: list[Vertex] = []
        self.weights: list[Ref] = []
        self.states: list[Ref] = []
        self.kept: dict[int, Ref] = {}
        self.kept_norm: dict[bool, Ref] = {}
        self.gradients: dict[int, Ref] = {}
        self.squares: list[Ref] = []
        self.checkpoints: list[Ref] = []
        self.ended: tuple[int, ...] = ()
        self.final = False
        self.tokens = self.x = (0, 0)
        computing = self.model.parameters - self.model.table
        self.forward_rate = study.measured.forward / computing
        self.gradient_rate = (study.measured.backward - study.measured.forward) / computing / 2

    def add(
        self,
        op: str,
        inputs: tuple[Ref, ...],
        sizes: tuple[int, ...],
        seconds: float | None = None,
        *,
        traits: Traits | None = None,
        inplace: tuple[tuple[int, int], ...] = (),
        after: tuple[int, ...] = (),
    ) -> Ref:
        kind = VertexKind.KERNEL if traits is None else VertexKind.INPUT
        number, traits = len(self.vertices), traits or PER_STEP
        made = Vertex(number, kind, 0, op, inputs, sizes, seconds, traits, inplace=inplace, after=after)
        self.vertices.append(made)
        return (made.id, 0)

    @property
    def activation(self) -> int:
        return 2 * self.model.tokens * self.model.hidden

    def inputs(self) -> None:
        """Weights and states of all pieces; deferred: gradients of the step before, and their norm."""
        for piece in self.pieces:
            state, other = self._traits(piece.number)
            self.weights.append(self.add("weight", (), (WEIGHT * piece.parameters,), traits=other))
            self.states.append(self.add("state", (), (STATE * piece.parameters,), traits=state))
            if piece.number in self.options.deferred:
                self.kept[piece.number] = self.add("gradient", (), (GRADIENT * piece.parameters,), traits=other)
        if self.options.deferred and self.options.clip:
            # Two homes: what one side writes the other reads nowhere.
            for there in sorted({number in self.options.on_host for number in self.kept}):
                self.kept_norm[there] = self.add("norm", (), (_SCALAR,), traits=CHANGES)

    def _traits(self, number: int) -> tuple[Traits, Traits]:
        """Of the state of a piece, and of its other values."""
        if self.options.stays is None or number in self.options.on_host:
            return CHANGES, CHANGES
        there = replace(CHANGES, stays=True)
        return there if number in self.options.stays else CHANGES, there

    def updates(self, gradients: dict[int, Ref], norms: Mapping[bool, Ref]) -> None:
        """In the order of ``gradients``; from here on the weights are those that they make. ``norms``: what the updates
        on the host read, and the others; none without clipping."""
        for number in list(gradients):
            piece = self.pieces[number]
            norm = norms.get(number in self.options.on_host)
            read = (self.weights[number], self.states[number], gradients[number], *([] if norm is None else [norm]))
            sizes = (WEIGHT * piece.parameters, STATE * piece.parameters)
            seconds = self.study.machine.device_seconds(piece.parameters)
            made = self.add(UPDATE, read, sizes, seconds, inplace=((0, 0), (1, 1)))
            self.weights[number], self.states[number] = made, (made[0], 1)

    def _weights(self, layer: int) -> tuple[Ref, ...]:
        return tuple(self.weights[piece.number] for piece in self.by_layer[layer])

    def _parameters(self, layer: int) -> int:
        return sum(piece.parameters for piece in self.by_layer[layer])

    def forward(self) -> None:
        """Leaves the checkpoints of all layers and the last hidden state. A training loop's micro-batches follow each
        other: the backward before has ended."""
        self.tokens = self.add("tokens", (), (8 * self.model.tokens,), traits=PER_STEP)
        self.x = self.add("embed", (self.tokens, *self._weights(0)), (self.activation,), 0.0, after=self.ended)
        self.checkpoints = []
        for layer in range(1, self.model.layers + 1):
            self.checkpoints.append(self.x)
            seconds = self.forward_rate * self._parameters(layer)
            self.x = self.add("forward", (self.x, *self._weights(layer)), (self.activation,), seconds)

    def backward(self, *, first: bool, last: bool) -> None:
        """``first``: of the micro-batches: its gradients are made, those of the others are added to them; ``last``:
        then they are final."""
        self.final = last
        top = self.model.layers + 1
        logits = self.model.tokens * self.model.shape["vocab_size"] * (2 + 4)
        loss = self.add(
            "loss",
            (self.x, *self._weights(top)),
            (_SCALAR, logits),
            self.forward_rate * self._parameters(top),
        )
        saved: Ref = (loss[0], 1)
        gradient = self._layer_backward(top, saved, (saved, self.x), first)
        for layer in range(self.model.layers, 0, -1):
            checkpoint = self.checkpoints[layer - 1]
            again = self.add(
                "recompute",
                (checkpoint, *self._weights(layer)),
                (SAVED * self.model.tokens * self.model.hidden,),
                self.forward_rate * self._parameters(layer),
                after=(gradient[0],),
            )
            gradient = self._layer_backward(layer, gradient, (again,), first)
        self._weight_gradient(self.by_layer[0][0], (gradient, self.tokens), first, seconds=0.0)
        self.ended = (self.gradients[0][0],)

    def _layer_backward(self, layer: int, gradient: Ref, saved: tuple[Ref, ...], first: bool) -> Ref:
        seconds = self.gradient_rate * self._parameters(layer)
        if layer == self.model.layers + 1:
            # Nothing is recomputed there.
            seconds += self.forward_rate * self._parameters(layer) / 2
        before = gradient
        gradient = self.add("input gradient", (before, *saved, *self._weights(layer)), (self.activation,), seconds)
        for piece in self.by_layer[layer]:
            share = seconds * piece.parameters / self._parameters(layer)
            self._weight_gradient(piece, (before, *saved), first, share)
        return gradient

    def _weight_gradient(self, piece: Piece, read: tuple[Ref, ...], first: bool, seconds: float) -> None:
        number, size = piece.number, GRADIENT * piece.parameters
        deferred = number in self.options.deferred
        stays = deferred and number not in self.options.on_host
        onto = self.kept[number] if first and stays else None if first else self.gradients.pop(number)
        square = (_SCALAR,) if self.options.clip and self.final else ()
        inputs = read if onto is None else (*read, onto)
        inplace = () if onto is None else ((0, len(read)),)
        made = self.add("weight gradient", inputs, (size, *square), seconds, inplace=inplace)
        if square:
            self.squares.append((made[0], 1))
        self.gradients[number] = made
        if deferred and self.final and not stays:
            self.add(KEEP, (self.kept[number], made), (size,), 0.0, inplace=((0, 0),))

    def norm(self) -> Mapping[bool, Ref]:
        """Of all gradients, from the squares of each; for the next step's updates if these are deferred."""
        made = self.add("norm of all", tuple(self.squares), (_SCALAR,), 0.0)
        for there, kept in self.kept_norm.items():
            self.add(KEEP if there else "keep norm", (kept, made), (_SCALAR,), 0.0, inplace=((0, 0),))
        return {True: made, False: made}


def kernels_named(graph: TaskGraph, *ops: str) -> Iterator[Vertex]:
    """Kernels of these names, in order."""
    return (v for v in graph.vertices if v.kind is VertexKind.KERNEL and v.op in ops)
