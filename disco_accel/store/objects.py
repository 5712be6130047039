"""The objects of a store, their uses and the clients that hold them, as data; and the order in which objects leave."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from disco_accel.eviction import Candidate, Policy
from disco_accel.store.messages import Opcode, Tier

LEAD = 1.5
"""How early an evicted object starts back before its announced use, in durations of its copy and of the copies before
it on the link: half as long again, for others that come in between."""
_LATE, _CROWD = 0.1, 2.0
"""Of an announced use: the part of loads ahead of time that come too late, and how much more a busy link delays others
than its mean says, because loads come in bursts. Tried on the sequences of ``benchmarks/store/policies.py`` with links
of 1.5 to 10 GB/s. Without both, a link of which a third is used doubles the waits. A quarter in the place of all three
terms reduces the waits on a free link by 30 % instead of 15 to 25 %."""
_NO_TIME = 1e-9
"""Seconds of a copy that takes none."""


@dataclass(eq=False, slots=True)
class Client:
    """A client, as far as memory goes. ``label``: its name, "" for none. ``held``: bytes that it has taken of its
    grant. ``first_class``: bytes of each device that its process holds apart from the store. ``devices``: those
    that its budget is of, as much on each. ``run``: a number that it has in common with processes that it waits for in
    each step; 0: there are none."""

    pid: int
    label: str = ""
    owned: dict[int, Object] = field(default_factory=dict)
    leases: dict[Object, int] = field(default_factory=dict)
    nbytes: int = 0
    minimum: int = 0
    max_useful: int = 0
    grant: int = 0
    held: int = 0
    first_class: dict[int, int] = field(default_factory=dict)
    devices: frozenset[int] = frozenset({0})
    run: int = 0

    @property
    def words(self) -> str:
        """Its process and label, for messages."""
        return f"process {self.pid}" + (f" ({self.label})" if self.label else "")

    @property
    def has_job(self) -> bool:
        """Whether it wants a budget, or still holds one."""
        return bool(self.minimum or self.max_useful or self.held)


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


@dataclass(eq=False, slots=True)
class Move:
    """A copy between tiers that a worker makes: to the device, or from it."""

    object: Object
    load: bool
    source: int
    target: int
    cancelled: threading.Event = field(default_factory=threading.Event)
    error: str | None = None


class Waiter(NamedTuple):
    """A request that is answered when its object is there."""

    client: Client
    number: int
    opcode: Opcode
    since: float


@dataclass(eq=False, slots=True)
class Object:
    """One tensor. ``final``: it was put. ``gone``: its name is free, and its memory is once nobody has a lease.

    ``footprint``: its bytes in whole pages, or in the device's grains. ``device_file``, ``host_file``: its memory in
    each tier, None where it has none; an object of the host tier lives in its ``host_file``. One with both is clean:
    its device memory can be dropped. While it moves, ``move`` has both files, of which the target is not the object's
    yet.
    """

    id: int
    owner: Client
    tier: Tier
    shape: tuple[int, ...]
    dtype: int
    nbytes: int
    footprint: int
    uses: UseHistory
    final: bool = False
    gone: bool = False
    device_file: int | None = None
    host_file: int | None = None
    move: Move | None = None
    leases: int = 0
    waiters: list[Waiter] = field(default_factory=list)
    prefetching: bool = False

    @property
    def file(self) -> int | None:
        """The memory that clients use, None where it is not there."""
        return self.host_file if self.tier is Tier.HOST else self.device_file

    @property
    def idle(self) -> bool:
        """Whether it is on the device and could leave."""
        resident = self.tier is Tier.DEVICE and self.device_file is not None
        return resident and self.final and not self.leases and self.move is None and not self.waiters


def footprint_of(nbytes: int, grain: int = mmap.PAGESIZE) -> int:
    """``nbytes`` in whole pages, or in whole multiples of ``grain``."""
    return -(-nbytes // grain) * grain


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
