"""The times and the order in which tensors were used in one step, to announce their uses in the next: of saved
activations (``UseOrder``) and of offloaded weights (``WeightUses``)."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from disco_accel.store.stored_object import Layout, StoredObject

AHEAD = 4
"""Uses for which a tensor is asked back ahead of its own. Announced times alone bring back one after another, each for
its own use: where the link is behind, later ones begin too late."""
_MOST = 1 << 16
"""Uses after which a step counts as ended: nobody calls the module whose forward would begin the next."""


class UseOrder:
    """The uses of one step, numbered by the caller, and those of the step before. Not thread safe."""

    def __init__(self) -> None:
        self._seconds: dict[int, tuple[int, float]] = {}
        self._order: list[int] = []
        self._last_seconds: dict[int, tuple[int, float]] = {}
        self._last_order: list[int] = []
        self._places: dict[int, int] = {}

    def begin_step(self) -> None:
        """The next step goes by the uses of this one. A step without uses teaches nothing."""
        if self._order:
            self._last_seconds, self._last_order = self._seconds, self._order
            self._places = {number: place for place, number in enumerate(self._order)}
        self._seconds, self._order = {}, []

    def seconds(self, number: int, nbytes: int) -> float | None:
        """From now to use ``number``, as it was in the last step from the same event on. None in the first step, and
        where that use was of another size."""
        size, seconds = self._last_seconds.get(number, (nbytes, None))
        return seconds if size == nbytes else None

    def note(self, number: int, nbytes: int, seconds: float) -> None:
        """Use ``number`` comes now, ``seconds`` after the event from which it is announced."""
        self._seconds[number] = (nbytes, seconds)
        self._order.append(number)

    def following(self, number: int) -> list[int]:
        """The uses that come next after ``number``: in the order of the last step; in the first, backwards as autograd
        goes."""
        if self._last_order:
            place = self._places.get(number)
            return [] if place is None else self._last_order[place + 1 : place + 1 + AHEAD]
        return list(range(number - 1, max(-1, number - 1 - AHEAD), -1))


@dataclass(eq=False, slots=True)
class Weight:
    """A weight in a store. ``name``: of the parameter. ``last``: its last use, as its step's gaps, the place of the
    use there, and its time."""

    name: str
    item: StoredObject
    layout: Layout
    last: tuple[list[float | None], int, float] | None = None


@dataclass(slots=True)
class _StepUses:
    """The weights used in a step in their order, and the seconds until each was used again, in this step or later."""

    weights: list[Weight] = field(default_factory=list)
    gaps: list[float | None] = field(default_factory=list)


class WeightUses:
    """The uses of a module's weights, from one forward of the module to the next. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now, self._before = _StepUses(), _StepUses()

    def begin_step(self) -> None:
        """The module's forward begins."""
        with self._lock:
            self._turn()

    def forget(self) -> None:
        """Drop all weights."""
        with self._lock:
            self._now, self._before = _StepUses(), _StepUses()

    def _turn(self) -> None:
        if self._now.weights:
            self._now, self._before = _StepUses(), self._now

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
