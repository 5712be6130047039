"""From a task graph to a chain of layers, and from a choice of gaps back to residents of its plan.

Layers are found by dataflow alone, so graphs from files have them too. The *turn* is the position that most weights are
read both before and after. Two weights belong to the same layer unless all reads of one come before all reads of the
other in the forward, and after them in the backward: with activation checkpointing, where a layer's recomputation and
backward read its weights anew, that gives the layers that are checkpointed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from disco_accel.errors import PlanError
from disco_accel.graph.check import called
from disco_accel.graph.spaces import TO_DEVICE
from disco_accel.graph.strict_json import plain
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.graph.values import outlives_step
from disco_accel.plan.beaumont.selection import Instance, Layer, WeightGap
from disco_accel.plan.buildmemgraph.residents import SMALL, Residents
from disco_accel.plan.timed.requirements import requirements_of
from disco_accel.plan.timed.step_buffers import StepRequirements, SwappableBuffer
from disco_accel.simulate.simulator import Machine


@dataclass(frozen=True)
class Chain:
    """``layers``: ids of the weights of each layer of ``instance``; ``small``: ids of those that never leave."""

    instance: Instance
    layers: tuple[tuple[int, ...], ...]
    small: tuple[int, ...]


def chain_of(graph: TaskGraph, machine: Machine) -> Chain:
    """Return ``graph``, a training step on one device, as the chain that ``weights_solve`` knows.

    What a layer's forward leaves for its backward is its ``a``; small weights and, at its fullest, everything else are
    in ``a0``. The bandwidth is that of ``machine``'s link to the device, latency included. Raises PlanError if there is
    no backward, or if the weights that are read in both directions do not make two layers or more; ConfigError if a
    layer does not fit.
    """
    if len(graph.devices) != 1:
        raise PlanError(f"'{plain(graph.name)}' has {len(graph.devices)} devices; a chain of layers has one")
    if (host_updated := next((vertex for vertex in graph.vertices if not outlives_step(vertex)), None)) is not None:
        raise PlanError(
            f"{called(host_updated)}: is updated by the host between two steps, and a chain's weights are frozen"
        )
    demand = requirements_of(graph, machine, None)
    clean = [page for page in demand.swappable if page.starts_on_host]
    small = [page for page in clean if page.size < SMALL]
    large = sorted((page for page in clean if page.size >= SMALL), key=lambda page: page.uses[0])
    turn = _turn(large, demand.end)
    groups = _layers(large, turn)
    if len(groups) < 2:
        raise PlanError(
            f"'{plain(graph.name)}' is no chain of layers: its weights are read in no order that turns round"
        )
    total = sum(page.size for page in large)
    link = machine.link(TO_DEVICE)
    instance = Instance(
        memory=float(graph.devices[0].memory),
        bandwidth=total / (total / link.bandwidth + len(large) * link.latency),
        a0=0.0,
        layers=_measured(demand, groups, turn),
        frozen=True,
    )
    ids = tuple(tuple(page.ref[0] for page in group) for group in groups)
    rest = sum(page.block for page in small) + _rest(demand, groups, turn, instance)
    return Chain(replace(instance, a0=float(rest)), ids, tuple(page.ref[0] for page in small))


def residents_of(chain: Chain, chosen: Collection[WeightGap]) -> Residents:
    """Return who is there at the start if the weights of ``chosen`` gaps are away; who has no gap never leaves."""
    leaving = {gap.layer for gap in chosen}
    across = {gap.layer for gap in chosen if gap.across}
    stay = [id for layer, ids in enumerate(chain.layers) if layer not in leaving for id in ids]
    visit = [id for layer, ids in enumerate(chain.layers) if layer in leaving - across for id in ids]
    return Residents((*chain.small, *stay), tuple(visit))


def _turn(pages: Sequence[SwappableBuffer], end: int) -> int:
    """Return the first of the positions that most of ``pages`` are read both before and from then on."""
    straddling = np.zeros(end + 2, np.int64)
    for page in pages:
        straddling[page.uses[0] + 1] += 1
        straddling[page.uses[-1] + 1] -= 1
    return int(np.cumsum(straddling).argmax())


def _layers(pages: Sequence[SwappableBuffer], turn: int) -> list[list[SwappableBuffer]]:
    """Divide ``pages``, sorted by first use, wherever the backward mirrors it; those read on one side follow that."""
    forward = [[use for use in page.uses if use < turn] for page in pages]
    backward = [[use for use in page.uses if use >= turn] for page in pages]
    far = 1 << 62
    # By number of pages before the cut: the latest of their forward, the earliest of their backward.
    latest = [-1, *accumulate((max(uses, default=-1) for uses in forward), max)]
    earliest = [far, *accumulate((min(uses, default=far) for uses in backward), min)]
    next_first = [*reversed([far, *accumulate((min(uses, default=far) for uses in reversed(forward)), min)])]
    next_last = [*reversed([-1, *accumulate((max(uses, default=-1) for uses in reversed(backward)), max)])]
    groups: list[list[SwappableBuffer]] = []
    for at, page in enumerate(pages):
        if at == 0 or (latest[at] < next_first[at] and earliest[at] > next_last[at]):
            groups.append([])
        groups[-1].append(page)
    return groups


def _starts(groups: Sequence[Sequence[SwappableBuffer]], turn: int, end: int) -> tuple[list[int], list[int]]:
    """Return the first positions of each layer's forward, and of its backward, which ends where the one above begins.

    A layer that is not read on a side takes no time there.
    """
    forward = [min((use for page in group for use in page.uses if use < turn), default=turn) for group in groups]
    backward: list[int] = []
    for group in groups:
        uses = [use for page in group for use in page.uses if use >= turn]
        backward.append(min(uses, default=backward[-1] if backward else end))
    return [0, *forward[1:], turn], [end, *backward[:-1], turn]


def _measured(demand: StepRequirements, groups: Sequence[Sequence[SwappableBuffer]], turn: int) -> tuple[Layer, ...]:
    forward, backward = _starts(groups, turn, demand.end)
    clock = [0.0, *accumulate(demand.seconds)]
    kept = np.zeros(turn + 1)
    for storage in demand.pinned:
        if storage.first < turn <= storage.last:
            kept[max(0, storage.first)] += storage.block
    return tuple(
        Layer(
            u_f=clock[forward[k + 1]] - clock[forward[k]],
            u_b=clock[backward[k]] - clock[backward[k + 1]],
            w=float(sum(page.block for page in group)),
            a=float(kept[forward[k] : forward[k + 1]].sum()),
        )
        for k, group in enumerate(groups)
    )


def _rest(demand: StepRequirements, groups: Sequence[Sequence[SwappableBuffer]], turn: int, instance: Instance) -> int:
    """Return the most bytes in use at any position beside weights and what the instance counts there."""
    forward, backward = _starts(groups, turn, demand.end)
    (fixed,) = demand.pinned_bytes.values()
    rest = 0.0
    for op in range(instance.ops):
        layer = instance.layer_of(op)
        span = (backward[layer + 1], backward[layer]) if op >= len(groups) else (forward[layer], forward[layer + 1])
        if span[1] > span[0]:
            rest = max(rest, float(fixed[slice(*span)].max() - instance.activations[op]))
    return int(rest)
