"""Which layers' weights leave the device between their uses, after Beaumont, Eyraud-Dubois and Shilova, "Weight
Offloading Strategies for Training Large DNN Models" (2022), for networks that are a chain of layers.

A step runs F1 .. Fn Bn .. B1, step after step. The weights of layer k are needed by Fk and Bk and may be away in the
two *gaps* between them: inside a step (Fk to Bk) and across steps (Bk to the next Fk). Bk updates them, so leaving the
device costs a write to the host and coming back a read. The write is needed once a step only: a layer's second gap is
*discounted*. Activations stay on the device from Fk to the end of Bk. The link carries one read and one write at a
time, each at ``bandwidth``. The result is a set of gaps (Algorithm 1, here) and a schedule (Algorithm 2,
``weights_schedule``), which ``weights_judge`` checks.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from disco_accel.errors import ConfigError
from disco_accel.sizes import format_size

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Layer:
    """``u_f`` and ``u_b``: seconds of forward and backward; ``w``: bytes of weights; ``a``: bytes that the forward
    leaves on the device until the backward has ended."""

    u_f: float
    u_b: float
    w: float
    a: float


@dataclass(frozen=True, slots=True, order=True)
class WeightGap:
    """The weights of layer ``layer`` (from 0) are away from its forward to its backward, or ``across`` steps."""

    layer: int
    across: bool


@dataclass(frozen=True)
class Instance:
    """A chain of layers on a device of ``memory`` bytes behind a link of ``bandwidth`` bytes per second and direction.

    ``a0``: bytes always in use. ``frozen``: no step changes the weights, the host's copy is always good and nothing
    is written. Ops are numbered in the order of execution: op k is Fk, op 2n-1-k is Bk. Raises ConfigError if some
    layer does not fit even when all other weights are away.
    """

    memory: float
    bandwidth: float
    a0: float
    layers: tuple[Layer, ...]
    frozen: bool = False

    def __post_init__(self) -> None:
        for op in range(self.ops):
            needed = float(self.activations[op]) + self.layers[self.layer_of(op)].w
            if needed > self.memory:
                raise ConfigError(
                    f"memory: {format_size(int(self.memory))} is too small: layer {self.layer_of(op) + 1} alone needs "
                    f"{format_size(int(needed))}, its weights and the activations of its {'FB'[op >= len(self.layers)]}"
                )

    @property
    def ops(self) -> int:
        """How many ops a step has."""
        return 2 * len(self.layers)

    def layer_of(self, op: int) -> int:
        """The layer that ``op`` belongs to."""
        return min(op, self.ops - 1 - op)

    @cached_property
    def seconds(self) -> Floats:
        """Seconds of each op."""
        return np.array([layer.u_f for layer in self.layers] + [layer.u_b for layer in reversed(self.layers)])

    @cached_property
    def activations(self) -> Floats:
        """Bytes in use beside weights while each op runs."""
        forward = self.a0 + np.cumsum([layer.a for layer in self.layers])
        return np.concatenate([forward, forward[::-1]])

    @cached_property
    def activations_after(self) -> Floats:
        """Bytes in use beside weights from the end of each op to the start of the next."""
        freed = [0.0] * len(self.layers) + [layer.a for layer in reversed(self.layers)]
        after: Floats = self.activations - np.array(freed)
        return after

    @cached_property
    def weights(self) -> Floats:
        """Bytes of weights of each layer."""
        return np.array([layer.w for layer in self.layers])

    @property
    def sum_u(self) -> float:
        """Seconds of computation in a step."""
        return float(self.seconds.sum())

    @property
    def l2l(self) -> float:
        """Seconds of a step that loads each layer's weights before its forward and its backward, one after the
        other, as L2L (Pudipeddi et al.) does."""
        return self.sum_u + 2 * float(self.weights.sum()) / self.bandwidth

    def uses(self, gap: WeightGap) -> tuple[int, int]:
        """The ops before and after ``gap``; the second may be one of the next step, that is ``ops`` or more."""
        forward, backward = gap.layer, self.ops - 1 - gap.layer
        return (backward, self.ops + forward) if gap.across else (forward, backward)

    def gaps(self) -> list[WeightGap]:
        """All gaps in which something runs and something could leave."""
        every = [WeightGap(k, across) for k, layer in enumerate(self.layers) if layer.w for across in (False, True)]
        return [gap for gap in every if self.uses(gap)[1] - self.uses(gap)[0] > 1]

    def during(self, gap: WeightGap) -> npt.NDArray[np.intp]:
        """The ops that run during ``gap``."""
        last, following = self.uses(gap)
        return np.arange(last + 1, following) % self.ops

    def excess(self, chosen: Collection[WeightGap], spare: float = 0.0) -> Floats:
        """Bytes by which each op exceeds the memory when the weights of ``chosen`` gaps are away.

        ``spare`` 1.0 counts the weights of the running layer twice: room in which those of the next ones arrive.
        """
        own = np.concatenate([self.weights, self.weights[::-1]])
        over: Floats = self.activations + self.weights.sum() + spare * own - self.memory
        for gap in chosen:
            over[self.during(gap)] -= self.layers[gap.layer].w
        return over


def select(instance: Instance, *, spare: float = 1.0, discount: bool = True) -> list[WeightGap]:
    """Algorithm 1: gaps in the order in which they are chosen, until no op exceeds the memory or none is left that
    helps.

    Each time the one of largest profit: over the ops that run meanwhile, seconds times the bytes of their excess that
    it removes, per second of copies that it costs. Of a layer's two gaps the second costs no write (``discount``).
    """
    over = instance.excess((), spare)
    chosen: list[WeightGap] = []
    taken: set[WeightGap] = set()

    def profit(gap: WeightGap, value: Floats) -> float:
        weight = instance.layers[gap.layer].w
        ops = instance.during(gap)
        writes = not instance.frozen and not (discount and WeightGap(gap.layer, not gap.across) in taken)
        return float(np.minimum(over[ops], weight).clip(0) @ value[ops]) / (weight * (2 if writes else 1))

    def entry(gap: WeightGap, value: Floats) -> tuple[float, float, WeightGap]:
        # Of equals the longest gap, which leaves most time for its copies.
        return -profit(gap, value), -float(instance.seconds[instance.during(gap)].sum()), gap

    # Ops that take no time come last: gaps are chosen for them only as far as memory is still exceeded then.
    for value in (instance.seconds, np.ones(instance.ops)):
        heap = [entry(gap, value) for gap in instance.gaps() if gap not in taken]
        heapq.heapify(heap)
        while heap:
            promised, _, gap = heapq.heappop(heap)
            if gap in taken:
                continue
            now = entry(gap, value)
            if now[0] > promised:
                heapq.heappush(heap, now)
            elif now[0] < 0:
                taken.add(gap)
                chosen.append(gap)
                over[instance.during(gap)] -= instance.layers[gap.layer].w
                other = WeightGap(gap.layer, not gap.across)
                if discount and other not in taken and len(instance.during(other)):
                    # It may have become cheaper.
                    heapq.heappush(heap, entry(other, value))
    return chosen


def without_superfluous(instance: Instance, chosen: Sequence[WeightGap], spare: float = 0.0) -> list[WeightGap]:
    """``chosen`` less the gaps that the later ones made superfluous, largest weights first."""
    over = instance.excess(chosen, spare)
    # Where even all of chosen exceed the memory by something, they may go on to exceed it by as much.
    allowed = over.clip(0)
    needed = set(chosen)
    for gap in sorted(chosen, key=lambda g: -instance.layers[g.layer].w):
        ops, weight = instance.during(gap), instance.layers[gap.layer].w
        if np.all(over[ops] + weight <= allowed[ops]):
            over[ops] += weight
            needed.remove(gap)
    return [gap for gap in chosen if gap in needed]
