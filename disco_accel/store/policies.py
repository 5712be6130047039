"""Which objects leave the device first when others need the room: pure functions, one score each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from disco_accel.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Candidate:
    """An object that may be evicted. Times are in seconds of one clock.

    ``nbytes``: the room that it gives. ``arrived``: when it came to the device. ``last_use``: when its last lease
    began or it was put. ``next_use``: as announced, None if nobody did. ``interval``: the mean time between its uses
    so far, None before the second. ``fetch_seconds``: of the copy that brings it back. ``save_seconds``: of the copy
    that has to be made before it can leave, 0 if the host has one. ``link_busy``: the part of time, of late, in which
    objects came over the link; ``link_queue``: seconds of those that are on their way.
    """

    id: int
    nbytes: int
    arrived: float
    last_use: float
    fetch_seconds: float
    save_seconds: float = 0.0
    next_use: float | None = None
    interval: float | None = None
    link_busy: float = 0.0
    link_queue: float = 0.0


LEAD = 1.5
"""An evicted object whose use was announced starts back so many times the duration of its copy, and of those before it
on the link, ahead: half as long again, for others that come in between."""
_LATE, _CROWD = 0.1, 2.0
"""Of ``next_use``: the part of loads ahead of time that come too late, and how much more a busy link delays others than
its mean says, because loads come in bursts. Tried on the sequences of ``benchmarks/store/policies.py`` with links of
1.5 to 10 GB/s: without both, a link of which a third is used doubles the waits; with a quarter in the place of all
three terms, waits fall by 30 % instead of 15 to 25 % on a free link."""

Policy = Callable[[Candidate, float], float]
"""Score of a candidate at a time: the largest leaves first."""


def wait(candidate: Candidate, now: float) -> float:
    """Seconds until the next use: as announced, else as its own history says.

    With a mean interval, the use is expected that long after the last. An object without one, or whose use is overdue,
    is expected to stay idle as long as it has been idle (Lindy's rule).
    """
    if candidate.next_use is not None:
        # An announced time that has passed means any moment now.
        return max(candidate.next_use - now, 0.0)
    idle = max(now - candidate.last_use, 0.0)
    if candidate.interval is None or idle > candidate.interval:
        return idle
    return candidate.interval - idle


def fifo(candidate: Candidate, now: float) -> float:
    """First the one that has been on the device for longest."""
    return now - candidate.arrived


def lru(candidate: Candidate, now: float) -> float:
    """First the one that has not been used for longest."""
    return now - candidate.last_use


def size_aware(candidate: Candidate, now: float) -> float:
    """First the one that would take most room for most time: bytes x seconds to its next use. A few large ones leave in
    place of many small ones, each of which would be missed by itself."""
    return candidate.nbytes * wait(candidate, now)


def latency_aware(candidate: Candidate, now: float) -> float:
    """Bytes x seconds to the next use, over the seconds of link time that leaving and coming back cost.

    A copy costs a latency whatever its size, so per byte small objects are dear to bring back; one with a copy on the
    host already leaves for nothing, so it costs half.
    """
    cost = candidate.fetch_seconds + candidate.save_seconds
    return candidate.nbytes * wait(candidate, now) / max(cost, 1e-9)


def next_use(candidate: Candidate, now: float) -> float:
    """Bytes x seconds to the next use, over the seconds that somebody waits for it then: fewer if that was announced.

    The store brings back an object before its announced use, so nobody waits for the copy itself. It keeps the link
    from others: as often as that is busy, and for the more of the time until the use the longer it takes. On a busy
    link, or where nothing is announced, what is used last leaves first (Belady 1966), a copy's latency apart. The copy
    to the host is no cost: it is made once, mostly ahead, and is there whenever the object leaves again.
    """
    away, cost = wait(candidate, now), candidate.fetch_seconds
    if candidate.next_use is not None and away > LEAD * (cost + candidate.link_queue):
        cost *= min(1.0, _LATE + _CROWD * candidate.link_busy + cost / away)
    return candidate.nbytes * away / max(cost, 1e-9)


POLICIES: Mapping[str, Policy] = {
    "fifo": fifo,
    "lru": lru,
    "size_aware": size_aware,
    "latency_aware": latency_aware,
    "next_use": next_use,
}
"""Name → policy; the command line takes its choices from here."""
DEFAULT = "next_use"


def policy_of(name: str) -> Policy:
    """The policy ``name``. Raises ConfigError naming those that there are."""
    if name not in POLICIES:
        raise ConfigError(f"policy: '{name}' is not one; there are {', '.join(POLICIES)}")
    return POLICIES[name]


def victims(policy: Policy, candidates: Iterable[Candidate], nbytes: int, now: float) -> list[Candidate]:
    """The candidates that leave so that ``nbytes`` get free, first ones first: as many as it takes, by ``policy``.
    Where all do not suffice, all. Ties go to the smaller id, so that the answer depends on the arguments alone."""
    chosen: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (-policy(c, now), c.id)):
        if nbytes <= 0:
            break
        chosen.append(candidate)
        nbytes -= candidate.nbytes
    # A large one that came last may make some before it needless.
    for candidate in list(chosen):
        if nbytes + candidate.nbytes <= 0:
            chosen.remove(candidate)
            nbytes += candidate.nbytes
    return chosen
