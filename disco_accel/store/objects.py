"""The objects of a store and the clients that hold them, as data."""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass, field
from typing import NamedTuple

from disco_accel.store.messages import Opcode, Tier
from disco_accel.store.victims import UseHistory


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
