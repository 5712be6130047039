"""Eviction policies: which copy of a value, or which object of a store, leaves the device first.

BUILDMEMGRAPH and the tensor store rank by the same functions. A policy ranks; the planner or the store decides which
candidates there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from disco_accel.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Candidate:
    """A copy that may be evicted. Times are places in the serial order of a plan, or seconds of a store's clock.

    ``nbytes``: memory that it frees. ``arrived``: when it came to the device. ``last_use``: its last use so far.
    ``wait``: time from ``now`` to its next use, as known or expected. ``cost``: of the copies to the host and back; in
    a plan bytes, in a store seconds. ``delay``: seconds that somebody waits at the next use, in a store alone.
    """

    nbytes: int
    arrived: float
    last_use: float
    now: float
    wait: float
    cost: float
    delay: float = 0.0


Policy = Callable[[Candidate], float]
"""Returns a rank: the candidate with the largest goes first."""


def fifo(candidate: Candidate) -> float:
    """The copy that came to the device first."""
    return -candidate.arrived


def lru(candidate: Candidate) -> float:
    """The copy that was used least recently."""
    return -candidate.last_use


def belady(candidate: Candidate) -> float:
    """The value with the furthest next use (Belady 1966)."""
    return candidate.now + candidate.wait


def size_aware(candidate: Candidate) -> float:
    """The copy that blocks most memory for longest: bytes times the time to the next use. A few large ones leave in
    place of many small ones."""
    return candidate.nbytes * candidate.wait


def latency_aware(candidate: Candidate) -> float:
    """The value with most time for its copies: the time to the next use over the cost of the copies."""
    return candidate.wait / candidate.cost


def cost(candidate: Candidate) -> float:
    """Bytes freed times the time to the next use, over the cost of the copies. A copy has a latency of any size, so per
    byte small ones are dear; one with a copy on the host leaves for nothing, so it costs half."""
    return candidate.nbytes * candidate.wait / candidate.cost


def next_use(candidate: Candidate) -> float:
    """Bytes freed times the time to the next use, over the seconds that somebody waits for it then."""
    return candidate.nbytes * candidate.wait / candidate.delay


POLICIES: Mapping[str, Policy] = {
    "belady": belady,
    "cost": cost,
    "fifo": fifo,
    "latency_aware": latency_aware,
    "lru": lru,
    "size_aware": size_aware,
}
"""Of BUILDMEMGRAPH, by the names of ``policy`` in a config."""

STORE_POLICIES: Mapping[str, Policy] = {
    "fifo": fifo,
    "lru": lru,
    "size_aware": size_aware,
    "latency_aware": cost,
    "next_use": next_use,
}
"""Of a store, by the names of ``--policy``. ``latency_aware`` counts bytes there, as ``cost`` does in a plan."""

AUTO = "auto"
"""Not a policy but the planner's choice: BUILDMEMGRAPH takes ``belady``."""
STORE_DEFAULT = "next_use"


def policy_named(name: str) -> Policy:
    """Return the policy ``name`` of BUILDMEMGRAPH. Raises ConfigError that lists the known ones."""
    if name == AUTO:
        return belady
    if name not in POLICIES:
        raise ConfigError(f"policy: {name!r} is unknown; known policies: {', '.join(sorted(POLICIES))}, or {AUTO}")
    return POLICIES[name]


def store_policy_named(name: str) -> Policy:
    """Return the policy ``name`` of a store. Raises ConfigError that lists the known ones."""
    if name not in STORE_POLICIES:
        raise ConfigError(f"policy: '{name}' is not one; there are {', '.join(STORE_POLICIES)}")
    return STORE_POLICIES[name]
