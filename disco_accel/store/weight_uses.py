"""The order in which offloaded weights are used, learned in one step to announce the uses of the next."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from disco_accel.store.stored_object import Layout, StoredObject
from disco_accel.store.use_order import AHEAD

_MOST = 1 << 16
"""Uses after which a step counts as ended: nobody calls the module whose forward would begin the next."""


@dataclass(eq=False, slots=True)
class Weight:
    """A weight in a store. ``name``: of the parameter. ``last``: its last use, as its step's gaps, the place of the
    use there, and its time."""

    name: str
    item: StoredObject
    layout: Layout
    last: tuple[list[float | None], int, float] | None = None


@dataclass(slots=True)
class _Step:
    """The weights used in a step in their order, and the seconds until each was used again, in this step or later."""

    weights: list[Weight] = field(default_factory=list)
    gaps: list[float | None] = field(default_factory=list)


class WeightUses:
    """The uses of a module's weights, from one forward of the module to the next. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now, self._before = _Step(), _Step()

    def begin_step(self) -> None:
        """The module's forward begins."""
        with self._lock:
            self._turn()

    def forget(self) -> None:
        """Let go of all weights."""
        with self._lock:
            self._now, self._before = _Step(), _Step()

    def _turn(self) -> None:
        if self._now.weights:
            self._now, self._before = _Step(), self._now

    def use(self, weight: Weight) -> tuple[float | None, list[Weight]]:
        """``weight`` is used now. Returns the seconds until it is used again, None if that is not known, and weights to
        ask back now, which are used soon."""
        with self._lock:
            now = time.monotonic()
            if len(self._now.weights) >= _MOST:
                self._turn()
            place = len(self._now.weights)
            if weight.last is not None:
                gaps, there, then = weight.last
                gaps[there] = now - then
            self._now.weights.append(weight)
            self._now.gaps.append(None)
            weight.last = (self._now.gaps, place, now)
            before = self._before.weights
            if place >= len(before) or before[place] is not weight:
                return None, []
            # At the end of a step come those of the begin of the next. Nearer ones were asked back before.
            first = place + 1 if place == 0 else place + AHEAD
            soon = [before[n % len(before)] for n in range(first, place + AHEAD + 1)]
            return self._before.gaps[place], [w for w in dict.fromkeys(soon) if w is not weight]
