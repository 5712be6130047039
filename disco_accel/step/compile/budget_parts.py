"""The parts of a memory budget, and the needs of a step on its device and in host memory, part by part.

The arena is the budget less all bytes that lie on the device outside the plan. Refusals and forecasts name the parts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from disco_accel.capture.captured_step import CapturedStep, InputBinding, InputSource, ValueBinding
from disco_accel.decompose.cache_at_home import LEAVES
from disco_accel.errors import ConfigError
from disco_accel.execute.arenas import arena_bytes
from disco_accel.graph.home_uses import host_devices
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import host_copy_exists, is_foreign, outlives_step
from disco_accel.sizes import format_size
from disco_accel.step.optimizer_home import TrainedBytes

_ROUNDING = 22 << 20
"""Bytes: blocks of up to 1 MiB share pieces of 2 MiB, those of up to 10 MiB pieces of 20 MiB, others are whole pieces
(c10/core/AllocatorConfig.h). One piece of each kind is only partly used."""

_SLACK = 256
"""Bytes outside an arena that several steps share are rounded up to this part of the budget: a batch that is some bytes
larger than all before leaves the other steps' plans as they are."""

_ROUNDING_SHARE = 64
"""No more than this part of the budget is set aside for it: one of less than 1.4 GiB may be exceeded by the rest."""

_GRAPHS = 64 << 20
"""Bytes. An H200 takes 46 MiB for the graphs of a step of 8 B parameters with 5394 kernels."""

_GRAPHS_SHARE = 64
"""No more than this part of the budget is set aside for them."""


@dataclass(frozen=True, slots=True)
class Budget:
    """All in bytes. ``total`` is the user's budget; the rest of ``total`` after the other parts is ``arena``.

    ``adapters``: trained weights on the device. ``outputs``: copies of logits that the user gets, and their gradient.
    ``others``: the most that another step with the same arena has on the device outside of it. The next are known once
    kernels have costs: ``workspaces``, those of the libraries that multiply matrices, and ``rounding``, memory that
    PyTorch's allocator takes from the driver and does not hand out. ``in_blocks``: memory comes from that allocator.
    ``graphs``: the most that launch graphs of all plans take, where ``has_graphs``.
    """

    total: int
    adapters: int
    batch: int
    outputs: int = 0
    others: int = 0
    workspaces: int = 0
    rounding: int = 0
    in_blocks: bool = False
    graphs: int = 0
    has_graphs: bool = False

    @classmethod
    def of(
        cls,
        total: int,
        trained: Iterable[torch.Tensor],
        batch: Iterable[torch.Tensor],
        outputs: int = 0,
        *,
        has_graphs: bool = False,
    ) -> Budget:
        """A budget for a step that has ``trained`` parameters and ``batch`` on the device."""
        return cls(total, _storage_bytes(trained), _storage_bytes(batch), outputs, has_graphs=has_graphs)

    @property
    def gradients(self) -> int:
        """One for each trained parameter."""
        return self.adapters

    @property
    def optimizer(self) -> int:
        """The state AdamW will hold: two tensors as large as each trained parameter."""
        return 2 * self.adapters

    @property
    def outside(self) -> int:
        """All but the arena."""
        return self._used + self.rounding + self.graphs

    @property
    def _used(self) -> int:
        return self.adapters + self.gradients + self.optimizer + self.batch + self.workspaces + self.outputs

    @property
    def arena(self) -> int:
        return self.total - self.outside

    def total_for(self, arena: int) -> int:
        """The smallest whole budget that leaves ``arena`` bytes."""
        used = total = self._used + arena
        # A larger budget has larger parts: from below this ends at the smallest that is as large as its own.
        while total < (more := used + self._rounding_of(total) + self._graphs_of(total)):
            total = more
        return total

    def split(self, workspaces: int = 0, *, in_blocks: bool = False) -> Budget:
        """The parts of ``total``, or of less where the arena is one that ``others`` leave too."""
        whole = self._parts(self.total, workspaces, in_blocks)
        if self.others <= whole.outside:
            return whole
        granule = max(1, self.total // _SLACK)
        arena = self.total - -(-self.others // granule) * granule
        return self._parts(min(self.total, whole.total_for(arena)), workspaces, in_blocks)

    def within(self, total: int, others: int = 0) -> Budget:
        """The parts of another ``total`` for the same step, beside ``others``."""
        return replace(self, total=total, others=others).split(self.workspaces, in_blocks=self.in_blocks)

    def with_arena(self, arena: int) -> Budget:
        """The budget that leaves so many bytes beside the same other parts."""
        return replace(self, total=self.outside + arena)

    def _parts(self, total: int, workspaces: int, in_blocks: bool) -> Budget:
        parts = replace(self, total=total, workspaces=workspaces, in_blocks=in_blocks)
        return replace(parts, rounding=parts._rounding_of(total), graphs=parts._graphs_of(total))

    def _rounding_of(self, total: int) -> int:
        # Workspaces are whole pieces.
        return min(_ROUNDING, -(-max(0, total - self.workspaces) // _ROUNDING_SHARE)) if self.in_blocks else 0

    def _graphs_of(self, total: int) -> int:
        return min(_GRAPHS, total // _GRAPHS_SHARE) if self.has_graphs else 0

    def as_dict(self) -> dict[str, int]:
        return {
            "total": self.total,
            "arena": self.arena,
            "adapters": self.adapters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "batch": self.batch,
            "workspaces": self.workspaces,
            "outputs": self.outputs,
            "rounding": self.rounding,
            "graphs": self.graphs,
        }


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    # By identity: storages on meta all have the same address.
    return sum({(s := t.untyped_storage())._cdata: s.nbytes() for t in tensors}.values())


def leaving_bytes(captured: CapturedStep) -> dict[str, int]:
    """Name → bytes of the user's copy of each output, or of its memory outside the arena. A loss takes none."""
    outside = (b for b in captured.bindings if b.source is InputSource.OUTSIDE and b.vertex not in captured.at_home)
    returned: list[ValueBinding | InputBinding] = [*captured.outputs, *outside]
    return {
        o.name: math.prod(o.spec.shape) * getattr(torch, o.spec.dtype).itemsize if o.spec.shape else 0 for o in returned
    }


def outputs_bytes(captured: CapturedStep) -> int:
    """Bytes outside the arena: the user's copy of each output, and the gradient of those that are differentiated."""
    sizes = leaving_bytes(captured)
    return sum(sizes.values()) + sum(sizes[o.name] for o in captured.outputs[: captured.differentiated])


def host_memory_parts(
    graph: TaskGraph, offloaded: int | None = None, rounded: int = 0, copies: Collection[int] = (), packed: int = 0
) -> dict[str, int]:
    """Bytes of host memory by part: ``frozen`` and ``trained`` weights that a step of ``graph`` loads, ``gradients``
    and ``moments`` of the trained ones, and ``offloaded`` values, if a plan says how many. ``rounded``: bytes of the
    model's weights that have fp32 ``masters``. ``copies``: inputs whose bytes another input has too. ``cache``: keys
    and values, if some are there.
    ``packed``: bytes of copies of columns of weights, if there are any."""
    hosts = host_devices(graph.devices)
    on_device = {device.id for device in graph.devices}.difference(hosts)
    weights = [v for v in graph.vertices if host_copy_exists(v) and v.space in on_device and v.id not in copies]
    updated = sum(v.sizes[0] for v in weights if not outlives_step(v) or v.op == InputSource.TRAINABLE)
    trained = TrainedBytes(updated, sum(v.sizes[0] for v in weights) - updated, min(rounded, updated))
    parts = {"frozen": trained.frozen, "trained": trained.weights}
    if trained.masters:
        parts["masters"] = trained.masters
    if packed:
        parts["packed"] = packed
    if cache := sum(vertex.sizes[0] for vertex in graph.vertices if is_foreign(vertex) and _holds_cache(vertex, hosts)):
        parts["cache"] = cache
    parts |= {"gradients": trained.gradients, "moments": trained.moments}
    return parts if offloaded is None else parts | {"offloaded": offloaded}


def _holds_cache(vertex: Vertex, hosts: Collection[int]) -> bool:
    """Whether a value in the user's memory is of a cache there: gradients that leave are counted as such."""
    return vertex.space in hosts and (vertex.kind is VertexKind.INPUT or vertex.op == LEAVES)


def what_it_needs(budget: Budget, arena: int, graph: TaskGraph, copies: Collection[int] = ()) -> str:
    """The parts of the smallest budget, which leaves ``arena`` bytes to a plan of ``graph``, and of host memory where
    weights are trained there. ``copies``: as for ``host_memory_parts``."""
    total = budget.total_for(arena)
    needed = replace(budget, others=0).within(total)
    on_device = {
        "the plan": arena,
        "trained weights": budget.adapters,
        "their gradients": budget.gradients,
        "two moments": budget.optimizer,
        "the batch": budget.batch,
        "outputs": budget.outputs,
        "workspaces": budget.workspaces,
        "the allocator": needed.rounding,
        "launch graphs": needed.graphs,
    }
    text = _listed(on_device)
    host = host_memory_parts(graph, copies=copies)
    if host["trained"]:
        return f"{text}; host memory holds {_listed(_named(host))}, and offloaded values"
    training = budget.adapters + budget.gradients + budget.optimizer
    if 2 * training > total:
        # As with optimizer: auto.
        text += f"; optimizer: host keeps {format_size(training)} of these in host memory"
    return text


def bytes_on_host(plan: MemGraph) -> int:
    """Of values that are offloaded, and of those that a host device makes, such as rows that it picks."""
    on_host = (device.id for device in plan.devices if device.is_host_device)
    return plan.host.memory + sum(arena_bytes(plan, device) for device in on_host)


def require_host_memory(
    limit: int, graph: TaskGraph, offloaded: int, rounded: int = 0, copies: Collection[int] = (), packed: int = 0
) -> None:
    """Raise ConfigError if a step of ``graph`` takes more than ``limit`` bytes of host memory, with its parts.
    ``rounded``, ``copies``, ``packed``: as for ``host_memory_parts``."""
    parts = host_memory_parts(graph, offloaded, rounded, copies, packed)
    needed = sum(parts.values())
    if needed > limit:
        raise ConfigError(
            f"host_memory: {format_size(limit)} is too small, the step needs {format_size(needed)}: "
            f"{_listed(_named(parts))}; raise it, or raise memory_budget so that less is offloaded"
        )


_NAMES = {
    "frozen": "frozen weights",
    "trained": "trained weights",
    "masters": "their fp32 masters",
    "gradients": "their gradients",
    "moments": "two moments",
    "offloaded": "offloaded values",
    "cache": "keys and values",
    "packed": "copies of columns of weights that devices share",
}


def _named(parts: Mapping[str, int]) -> dict[str, int]:
    return {_NAMES[part]: size for part, size in parts.items()}


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{format_size(size)} for {name}" for name, size in parts.items() if size)
