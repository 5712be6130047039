"""The planner's record of a value, and of its copy in device memory, while it walks the serial order."""

from __future__ import annotations

from dataclasses import dataclass, field

from disco_accel.graph.spaces import HOST
from disco_accel.graph.taskgraph import Ref, Vertex

_CLOSE = 20
"""Readers within one part in so many of the step are served by one copy."""


@dataclass(slots=True, eq=False)
class PlannedVertex:
    """A vertex of the plan in the making; ``alive`` turns false if it is revoked before anything depends on it."""

    vertex: Vertex
    alive: bool = True


@dataclass(slots=True, eq=False)
class DeviceCopy:
    """One copy of a value in device memory, from the vertex that writes it to its last reader.

    ``ref`` is how the plan names the copy. Its bytes are ``[addr, addr + aligned_size)``. ``readers`` are the ids of
    the vertices that read it so far and ``last_use`` is the serial position of the last of them, or of the writer.
    ``producer`` is the id of the writer, None for a copy that exists when the step starts. ``permanent``: it is never
    freed. ``planned`` is the reload that makes it, if one does; ``reserved_blocks`` are the free blocks it was made of,
    until the copy is first read. Till then the reload can be revoked and the blocks freed as they were. ``made_at`` is
    the serial position at which it was allocated.
    """

    value: ValueState
    ref: Ref
    addr: int
    aligned_size: int
    producer: int | None
    last_use: int
    permanent: bool = False
    planned: PlannedVertex | None = None
    reserved_blocks: list[FreeBlock] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)
    made_at: int = 0


@dataclass(slots=True, eq=False)
class FreeBlock:
    """Free bytes ``[start, end)`` that may be written once every vertex of ``release`` has finished.

    ``last_use`` is the serial position of the latest of them (-1 if none). ``cached``: these bytes still hold that copy
    of a value that the host has too; it can be taken back as long as nothing else was written to them. ``rank`` is the
    eviction rank that the copy had when it was cached.
    """

    start: int
    end: int
    release: tuple[int, ...]
    last_use: int
    cached: DeviceCopy | None = None
    rank: float = 0.0


@dataclass(slots=True, eq=False)
class ValueState:
    """A value of the task graph at the current position of the planner's walk.

    ``uses`` are the serial positions that read it, ascending, each once; the position after the last vertex stands for
    the virtual end vertex that reads kept values. ``next`` counts the uses that have been executed. ``copy`` is the
    copy on the device, if there is one; ``cached`` is the last copy that was freed, whose bytes may be intact.
    ``host`` names the copy in the backing space ``home``: an input, or a swap-out. ``reserved``: the copy is held for
    the next use,
    until a nearer use needs its memory. ``resident_offset`` is the address at which a resident of a cyclic plan must be
    when the step ends.
    """

    ref: Ref
    size: int
    device: int
    external: bool
    out: bool
    uses: list[int]
    after_last: int
    next: int = 0
    copy: DeviceCopy | None = None
    cached: DeviceCopy | None = None
    host: Ref | None = None
    home: int = HOST
    reserved: bool = False
    resident_offset: int | None = None

    @property
    def needed_only_at_step_end(self) -> bool:
        """Whether its one remaining use is to be at its resident offset when the step ends."""
        return self.resident_offset is not None and self.next_use == self.after_last - 1

    @property
    def serves_rest_and_end(self) -> bool:
        """Whether one reload to the resident offset serves all remaining reads, which are close, and the step's end."""
        if self.resident_offset is None or self.next + 1 >= len(self.uses):
            return False
        return (self.uses[-2] - self.uses[self.next]) * _CLOSE <= self.after_last

    @property
    def next_use(self) -> int:
        """Serial position of the next reader; ``after_last`` if there is none."""
        return self.uses[self.next] if self.next < len(self.uses) else self.after_last

    def use_after(self, position: int) -> int:
        """Serial position of the first reader behind ``position``; ``after_last`` if there is none."""
        for index in range(self.next, len(self.uses)):
            if self.uses[index] > position:
                return self.uses[index]
        return self.after_last
