"""Eviction policies: which value leaves the device first. A policy ranks; the planner decides what may be evicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from disco_accel.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Candidate:
    """A copy that may be evicted: ``size`` in bytes; positions are places in the serial order.

    ``made_at``: where the copy was made; ``last_use``: last reader so far; ``next_use``: next reader; ``now``: the
    vertex being executed; ``clean``: the host has the value, so that evicting it copies nothing.
    """

    size: int
    made_at: int
    last_use: int
    next_use: int
    now: int
    clean: bool


Policy = Callable[[Candidate], float]
"""Returns a rank: the candidate with the largest goes first."""

COPY_LATENCY_BYTES = 200_000
"""The fixed cost of a copy in bytes: 10 microseconds at 20 GB/s."""


def fifo(candidate: Candidate) -> float:
    """The copy that was made first."""
    return -candidate.made_at


def lru(candidate: Candidate) -> float:
    """The copy that was used least recently."""
    return -candidate.last_use


def belady(candidate: Candidate) -> float:
    """The value with the furthest next use (Belady 1966)."""
    return candidate.next_use


def size_aware(candidate: Candidate) -> float:
    """The copy that blocks most memory for longest: bytes times the vertices until the next use."""
    return candidate.size * (candidate.next_use - candidate.now)


def latency_aware(candidate: Candidate) -> float:
    """The value with most time for its copies: the vertices until the next use over the cost of the copies."""
    return (candidate.next_use - candidate.now) / _price(candidate)


def cost(candidate: Candidate) -> float:
    """Bytes freed times the vertices until the next use, over the cost of the copies."""
    return size_aware(candidate) / _price(candidate)


def _price(candidate: Candidate) -> int:
    """Return the cost of eviction and reload, in bytes copied: a clean value is copied once, not twice."""
    return (1 if candidate.clean else 2) * (candidate.size + COPY_LATENCY_BYTES)


POLICIES: Mapping[str, Policy] = {
    "belady": belady,
    "cost": cost,
    "fifo": fifo,
    "latency_aware": latency_aware,
    "lru": lru,
    "size_aware": size_aware,
}


AUTO = "auto"
"""Not a policy but the planner's choice: BUILDMEMGRAPH takes ``belady``."""


def policy_named(name: str) -> Policy:
    """Return the policy ``name``. Raises ConfigError that lists the known ones."""
    if name == AUTO:
        return belady
    if name not in POLICIES:
        raise ConfigError(f"policy: {name!r} is unknown; known policies: {', '.join(sorted(POLICIES))}, or {AUTO}")
    return POLICIES[name]
