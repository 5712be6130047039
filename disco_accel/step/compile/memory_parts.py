"""What a step needs on its device and in host memory, part by part: the words of refusals, the figures of forecasts."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from disco_accel.errors import ConfigError
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.graph.values import host_copy_exists, outlives_step
from disco_accel.sizes import format_size
from disco_accel.step.compile.budget_parts import Budget
from disco_accel.step.optimizer_home import TrainedBytes


def host_memory_parts(
    graph: TaskGraph, offloaded: int | None = None, rounded: int = 0, copies: Collection[int] = (), packed: int = 0
) -> dict[str, int]:
    """Bytes of host memory by part: ``frozen`` and ``trained`` weights that a step of ``graph`` loads, ``gradients``
    and ``moments`` of the trained ones, and ``offloaded`` values, if a plan says how many. ``rounded``: bytes of the
    model's weights that have fp32 ``masters``. ``copies``: inputs whose bytes another input has too.
    ``packed``: bytes of copies of columns of weights, if there are any."""
    on_device = {device.id for device in graph.devices if not device.is_host_device}
    weights = [v for v in graph.vertices if host_copy_exists(v) and v.space in on_device and v.id not in copies]
    host_updated = sum(v.sizes[0] for v in weights if not outlives_step(v))
    trained = TrainedBytes(host_updated, sum(v.sizes[0] for v in weights) - host_updated, min(rounded, host_updated))
    parts = {"frozen": trained.frozen, "trained": trained.weights}
    if trained.masters:
        parts["masters"] = trained.masters
    if packed:
        parts["packed"] = packed
    parts |= {"gradients": trained.gradients, "moments": trained.moments}
    return parts if offloaded is None else parts | {"offloaded": offloaded}


def what_it_needs(budget: Budget, arena: int, graph: TaskGraph, copies: Collection[int] = ()) -> str:
    """The parts of the smallest budget, which leaves ``arena`` bytes to a plan of ``graph``, and of host memory where
    weights are trained there. ``copies``: as for ``host_memory_parts``."""
    total = budget.total_for(arena)
    on_device = {
        "the plan": arena,
        "trained weights": budget.adapters,
        "their gradients": budget.gradients,
        "two moments": budget.optimizer,
        "the batch": budget.batch,
        "outputs": budget.outputs,
        "workspaces": budget.workspaces,
        "the allocator": total - arena - budget.outside + budget.rounding,
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


def require_host_memory(
    limit: int, graph: TaskGraph, offloaded: int, rounded: int = 0, copies: Collection[int] = (), packed: int = 0
) -> None:
    """Raise ConfigError if a step of ``graph`` takes more than ``limit`` bytes of host memory, with what it takes.
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
    "packed": "copies of columns of weights that devices share",
}


def _named(parts: Mapping[str, int]) -> dict[str, int]:
    return {_NAMES[part]: size for part, size in parts.items()}


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{format_size(size)} for {name}" for name, size in parts.items() if size)
