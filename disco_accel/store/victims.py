"""Which objects leave the device when others need the room, and the estimates of uses and copies by which a policy
ranks them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from disco_accel.eviction import Candidate, Policy

LEAD = 1.5
"""An evicted object whose use was announced starts back so many times the duration of its copy, and of those before it
on the link, ahead: half as long again, for others that come in between."""
_LATE, _CROWD = 0.1, 2.0
"""Of an announced use: the part of loads ahead of time that come too late, and how much more a busy link delays others
than its mean says, because loads come in bursts. Tried on the sequences of ``benchmarks/store/policies.py`` with links
of 1.5 to 10 GB/s: without both, a link of which a third is used doubles the waits; with a quarter in the place of all
three terms, waits fall by 30 % instead of 15 to 25 % on a free link."""
_NO_TIME = 1e-9
"""Seconds of a copy that takes none."""


class BusyShare:
    """The part of time in which a link was busy, of late: a mean that forgets within ``SECONDS``."""

    SECONDS = 2.0

    def __init__(self) -> None:
        self._share = self._then = 0.0

    def add(self, seconds: float, now: float) -> None:
        """The link takes a copy of so many seconds at ``now``."""
        self._share, self._then = self.at(now) + seconds / self.SECONDS, now

    def at(self, now: float) -> float:
        """The share at ``now``; more than 1 where copies wait for each other."""
        return self._share * math.exp(-max(0.0, now - self._then) / self.SECONDS)


@dataclass(slots=True)
class UseHistory:
    """The uses of one object, in seconds of one clock.

    ``arrived``: when it came to the device. ``last_use``: when its last lease began or ended, or it was put.
    ``next_use``: as announced, None if nobody did. ``interval``: the mean time between its uses so far, None before the
    second.
    """

    arrived: float
    last_use: float
    next_use: float | None = None
    interval: float | None = None

    def used(self, now: float) -> None:
        """Note a use: an announced one has come."""
        since = now - self.last_use
        self.interval = since if self.interval is None else (self.interval + since) / 2
        self.last_use, self.next_use = now, None

    def wait(self, now: float) -> float:
        """Seconds until the next use: as announced, else as its own history says.

        With a mean interval, the use is expected that long after the last. An object without one, or whose use is
        overdue, is expected to stay idle as long as it has been idle (Lindy's rule).
        """
        if self.next_use is not None:
            # An announced time that has passed means any moment now.
            return max(self.next_use - now, 0.0)
        idle = max(now - self.last_use, 0.0)
        if self.interval is None or idle > self.interval:
            return idle
        return self.interval - idle

    def candidate(
        self, nbytes: int, now: float, fetch: float, save: float, link_busy: float = 0.0, link_queue: float = 0.0
    ) -> Candidate:
        """The object of ``nbytes`` for a policy. ``fetch``: seconds of the copy that brings it back. ``save``: of the
        copy that has to be made before it can leave. ``link_busy``: the part of time, of late, in which objects came
        over the link; ``link_queue``: seconds of those that are on their way.

        An object whose use was announced is brought back before, so nobody waits for the copy itself. It keeps the link
        from others: as often as that is busy, and for the more of the time until the use the longer it takes. The copy
        to the host delays nobody: it is made once, mostly ahead, and is there whenever the object leaves again.
        """
        away, delay = self.wait(now), fetch
        if self.next_use is not None and away > LEAD * (fetch + link_queue):
            delay *= min(1.0, _LATE + _CROWD * link_busy + fetch / away)
        cost = max(fetch + save, _NO_TIME)
        return Candidate(nbytes, self.arrived, self.last_use, now, away, cost, max(delay, _NO_TIME))


def victims(policy: Policy, candidates: Mapping[int, Candidate], nbytes: int) -> list[int]:
    """The ids of the candidates that leave so that ``nbytes`` get free, first ones first: as many as it takes, by
    ``policy``. Where all do not suffice, all. Ties go to the smaller id, so that the answer depends on the arguments
    alone."""
    chosen: list[int] = []
    for id in sorted(candidates, key=lambda id: (-policy(candidates[id]), id)):
        if nbytes <= 0:
            break
        chosen.append(id)
        nbytes -= candidates[id].nbytes
    # A large one that came last may make some before it needless.
    for id in list(chosen):
        if nbytes + candidates[id].nbytes <= 0:
            chosen.remove(id)
            nbytes += candidates[id].nbytes
    return chosen
