"""A step as data: as it was traced, and as a graph with its inputs, outputs and gradients."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from disco_accel.graph.home_uses import host_devices
from disco_accel.graph.lengths import _Lengths
from disco_accel.graph.passes import AppliedPass, GraphPass, applied_pass, run_passes
from disco_accel.graph.taskgraph import Ref, RngSite, TaskGraph, TensorSpec
from disco_accel.graph.values import is_foreign, never_changes


class InputSource(enum.StrEnum):
    """Where the bytes of an input come from."""

    FROZEN = "frozen"
    """A weight that is not trained."""
    BUFFER = "buffer"
    """A buffer of the model."""
    TRAINABLE = "trainable"
    """A parameter that is trained."""
    BATCH = "batch"
    """A tensor of the batch."""
    TANGENT = "tangent"
    """The gradient of an output, which arrives with the backward."""
    OUTSIDE = "outside"
    """Memory of the caller's that an output is written to."""
    CONSTANT = "constant"
    """A tensor that the forward reads from elsewhere, such as a plain attribute."""


@dataclass(frozen=True, slots=True)
class InputBinding:
    """The content of INPUT ``vertex``, which comes from ``source``.

    ``name``: the parameter's or buffer's as in ``model.named_parameters()``, the batch key (dotted inside
    containers), the output whose tangent it is or that is written there, or a key of ``CapturedStep.constants``.
    ``spec`` has offset 0: the vertex's bytes start at the tensor's first element. Of a tensor that is
    shared out along ``dim`` it is number ``part`` of so many equal ``parts``: rows of the batch, or of a weight.
    """

    vertex: int
    source: InputSource
    name: str
    spec: TensorSpec
    part: int = 0
    parts: int = 1
    dim: int = 0


@dataclass(frozen=True)
class TracedStep:
    """``graph`` of aten ops on fake tensors. ``sources``: source and name, as in ``InputBinding``, of each placeholder.
    ``sites``: the use of the generator by ops that draw random numbers. ``output_grads``: gradients of the outputs of
    checkpointed layers, which their recomputation waits for.
    """

    graph: fx.Graph
    sources: Sequence[tuple[InputSource, str]]
    sites: Mapping[fx.Node, RngSite]
    output_grads: Mapping[int, Iterable[torch.Tensor]]


Rewrite = Callable[[TracedStep], TracedStep]
"""Makes another step of a traced one, with the same inputs, outputs and gradients by name."""


@dataclass(frozen=True, slots=True)
class ValueBinding:
    """An output or the gradient of the trainable parameter ``name``: value ``ref`` seen through ``spec``."""

    name: str
    ref: Ref
    spec: TensorSpec


@dataclass(frozen=True)
class CapturedStep:
    """A step as a graph. ``constants``: the live tensors behind the INPUTs from CONSTANT.

    A forward alone has neither ``gradients`` nor a late input. In a training step the first ``differentiated`` of
    ``outputs`` are. A trainable parameter that they do not reach has no entry in ``gradients``: eager leaves it None.
    ``bare``: the model returns the first output itself, not something that has it as a field. ``passes``: those that
    ``graph`` has been through. ``kept_casts``: trained weights of which an autocast region keeps a cast for its further
    forwards, with the dtype of eager's sums of their gradients over several such forwards. It is "" where eager adds
    parts of a gradient, as the weight is used several times. ``structure``: the result of a forward alone with places
    for its tensors, as the caller of the capture understands it. ``offered``: kernels that the script does not run; a
    plan may run them to compute values again. ``lengths``: of a forward alone that depends on a length; all else is
    as at the longest.
    """

    graph: TaskGraph
    bindings: tuple[InputBinding, ...]
    outputs: tuple[ValueBinding, ...]
    gradients: tuple[ValueBinding, ...]
    constants: Mapping[str, torch.Tensor]
    bare: bool = False
    differentiated: int = 1
    passes: tuple[AppliedPass, ...] = ()
    kept_casts: Mapping[str, str] = field(default_factory=dict)
    structure: Any = None
    offered: frozenset[int] = frozenset()
    lengths: _Lengths | None = None

    @functools.cached_property
    def lasting_weights(self) -> tuple[InputBinding, ...]:
        """Weights and buffers whose copy on the device is good for the next step too, until they are written to. In a
        forward alone trained weights may be among them, if they are on the host."""
        lasting = {vertex.id for vertex in self.graph.vertices if never_changes(vertex)}
        return tuple(
            binding
            for binding in self.bindings
            if binding.source in (InputSource.FROZEN, InputSource.BUFFER)
            or (binding.source is InputSource.TRAINABLE and binding.vertex in lasting)
        )

    @functools.cached_property
    def at_home(self) -> frozenset[int]:
        """Tensors of the batch and of the result, by the vertices of their bindings, that are in host memory."""
        hosts = host_devices(self.graph.devices)
        return frozenset(vertex.id for vertex in self.graph.vertices if is_foreign(vertex) and vertex.space in hosts)

    @property
    def bytes_at_home(self) -> int:
        """Bytes of these tensors."""
        sizes = {vertex.id: vertex.sizes[0] for vertex in self.graph.vertices}
        return sum(sizes[binding.vertex] for binding in self.bindings if binding.vertex in self.at_home)

    def rewritten(self, name: str, effect: str, graph: TaskGraph, **fields: Any) -> CapturedStep:
        """The step with ``graph``, noted as the result of one more pass, and with other ``fields``."""
        return replace(
            self, graph=graph, passes=(*self.passes, applied_pass(name, effect, self.graph, graph)), **fields
        )

    def through(self, passes: Iterable[GraphPass], **fields: Any) -> CapturedStep:
        """The step whose graph has been through ``passes`` more, with other ``fields``."""
        applied = list(self.passes)
        graph = run_passes(self.graph, passes, applied)
        return replace(self, graph=graph, passes=tuple(applied), **fields)

    @functools.cached_property
    def copies(self) -> frozenset[int]:
        """Inputs that have the bytes of another one, for another device."""
        first: dict[tuple[InputSource, str, int], int] = {}
        for binding in self.bindings:
            first.setdefault((binding.source, binding.name, binding.part), binding.vertex)
        return frozenset(binding.vertex for binding in self.bindings).difference(first.values())
