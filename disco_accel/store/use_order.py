"""When and in which order tensors were used in the last step, to say when they are used in this one."""

from __future__ import annotations

AHEAD = 4
"""Uses for which a tensor is asked back ahead of its own. Announced times alone bring back one after another, each for
its own use: where the link is behind, later ones begin too late."""


class UseOrder:
    """The uses of one step, numbered by the caller, and those of the step before. Not thread safe."""

    def __init__(self) -> None:
        self._seconds: dict[int, tuple[int, float]] = {}
        self._order: list[int] = []
        self._last_seconds: dict[int, tuple[int, float]] = {}
        self._last_order: list[int] = []
        self._places: dict[int, int] = {}

    def begin_step(self) -> None:
        """What was learned in this step is what the next goes by. A step without uses teaches nothing."""
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
