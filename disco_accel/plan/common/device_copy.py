"""What the planner knows about a value while it walks the serial order."""

from __future__ import annotations

from dataclasses import dataclass, field

from disco_accel.graph.taskgraph import Ref, Vertex

_CLOSE = 20
"""Readers within one part in so many of the step are served by one copy."""


@dataclass(slots=True, eq=False)
class Planned:
    """A vertex of the plan in the making; ``alive`` turns false if it is revoked before anything depends on it."""

    vertex: Vertex
    alive: bool = True


@dataclass(slots=True, eq=False)
class Stay:
    """One copy of a value in device memory, from the vertex that writes it to its last reader.

    ``ref`` is how the plan names the copy. ``readers`` are the ids of the vertices that read it so far and ``newest``
    is the serial position of the last of them, or of the writer. ``producer`` is None if it is there at the start.
    ``taken`` are the free pieces it was made of, kept until the copy is first read so that it can be revoked.
    """

    value: Value
    ref: Ref
    addr: int
    block: int
    producer: int | None
    newest: int
    permanent: bool = False
    planned: Planned | None = None
    taken: list[Piece] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)
    born: int = 0


@dataclass(slots=True, eq=False)
class Piece:
    """Free bytes ``[start, end)`` that may be written once every vertex of ``release`` has finished.

    ``newest`` is the serial position of the latest of them (-1 if none). ``cached``: these bytes still hold that copy,
    which the host has too: it can be taken back as long as nothing else was written there. ``rank`` is how gladly it
    was given up when it was cached.
    """

    start: int
    end: int
    release: tuple[int, ...]
    newest: int
    cached: Stay | None = None
    rank: float = 0.0


@dataclass(slots=True, eq=False)
class Value:
    """A value of the task graph. ``uses`` are the serial positions that read it, ascending, each once; the position
    after the last vertex stands for the virtual end vertex that reads what is kept. ``host`` names the copy that the
    host has: a clean input or an offload. ``cached`` is the last copy given back while still intact.
    ``home`` is the address at which a resident of a cyclic plan must be when the step ends."""

    ref: Ref
    size: int
    device: int
    external: bool
    out: bool
    uses: list[int]
    after_last: int
    next: int = 0
    stay: Stay | None = None
    cached: Stay | None = None
    host: Ref | None = None
    reserved: bool = False
    home: int | None = None

    @property
    def only_at_home(self) -> bool:
        """Whether all that is left to do is to be at home when the step ends."""
        return self.home is not None and self.next_use == self.after_last - 1

    @property
    def last_call(self) -> bool:
        """Whether a copy at home would serve the remaining readers, if close together, and the end of the step."""
        if self.home is None or self.next + 1 >= len(self.uses):
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
