"""A device's memory as a counter of bytes, in Python: the part of ``naive_swaps.py`` that evicts."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.timed.step_buffers import Profile, SwappableBuffer

NEVER = 1 << 60
"""A position behind all others."""

Evict = Callable[[int], None]


@dataclass(slots=True)
class ResidencyState:
    """The state of each swappable buffer at a moment of the simulation.

    ``resident``: whether it is on the device or on its way; ``held_until``: the position up to which it is promised;
    ``on_host_at``: the second from which on the host has a copy; ``uses_done``: how many of its ``uses`` are past."""

    buffers: list[SwappableBuffer]
    uses: list[list[int]]
    resident: list[bool] = field(default_factory=list)
    held_until: list[int] = field(default_factory=list)
    on_host_at: list[float] = field(default_factory=list)
    uses_done: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = len(self.buffers)
        self.resident = [False] * count
        self.held_until = [-1] * count
        self.on_host_at = [0.0 if buffer.starts_on_host else float("inf") for buffer in self.buffers]
        self.uses_done = [0] * count

    def next_use(self, buffer: int) -> int:
        """Return the position of the next use of ``buffer``, or NEVER."""
        uses = self.uses[buffer]
        return uses[self.uses_done[buffer]] if self.uses_done[buffer] < len(uses) else NEVER


class ByteCounter:
    """A device's memory as a number of bytes: buffers fit whenever the sum of their blocks does."""

    def __init__(self, state: ResidencyState, pinned_bytes: Profile, capacity: int, evict: Evict) -> None:
        self.state = state
        self.pinned_bytes = pinned_bytes
        self.capacity = capacity
        self.evict = evict
        self.bytes = 0
        """Of swappable buffers."""
        self.position = 0
        self.idle: list[tuple[int, int]] = []
        """A heap of (minus the next use, buffer). An entry is stale once its buffer is held again, evicted or used."""

    def add_at_start(self, buffer: int) -> None:
        """Have ``buffer`` on the device, idle, when the step starts."""
        self.bytes += self.state.buffers[buffer].block
        self.release(buffer)

    def release(self, buffer: int) -> None:
        """Note that ``buffer`` is held no longer."""
        heapq.heappush(self.idle, (-self.state.next_use(buffer), buffer))

    def free(self, buffer: int) -> None:
        """Give back the bytes of ``buffer``, which is evicted."""
        self.bytes -= self.state.buffers[buffer].block

    def advance(self, position: int, begin: float) -> float:
        """Go to ``position``, evicting for its pinned bytes. Return when these are free, not before ``begin``."""
        self.position = position
        return self._make_room(0, begin)

    def allocate(self, buffer: int, begin: float) -> float:
        """Take the bytes of ``buffer``, evicting others; return when they are free, not before ``begin``."""
        begin = self._make_room(self.state.buffers[buffer].block, begin)
        self.bytes += self.state.buffers[buffer].block
        return begin

    def _make_room(self, block: int, begin: float) -> float:
        """Evict idle buffers, furthest next use first (Belady), until ``block`` more bytes fit.

        One whose offload has not ended by ``begin`` is evicted only if nothing else is idle, the earliest to be on the
        host first: waiting for an offload delays the step, a reload that comes a little sooner may not."""
        state = self.state
        missing = int(self.pinned_bytes[self.position]) + self.bytes + block - self.capacity
        still_offloading: list[tuple[int, int]] = []
        while missing > 0:
            if self.idle:
                entry = heapq.heappop(self.idle)
                buffer = entry[1]
                held = state.held_until[buffer] >= self.position
                if not state.resident[buffer] or held or -entry[0] != state.next_use(buffer):
                    continue
                if state.on_host_at[buffer] > begin:
                    still_offloading.append(entry)
                    continue
            elif still_offloading:
                entry = min(still_offloading, key=lambda entry: (state.on_host_at[entry[1]], entry))
                still_offloading.remove(entry)
                buffer = entry[1]
                begin = max(begin, state.on_host_at[buffer])
            else:
                raise Infeasible(self.position)
            missing -= state.buffers[buffer].block
            self.evict(buffer)
        for entry in still_offloading:
            heapq.heappush(self.idle, entry)
        return begin
