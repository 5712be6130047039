"""Buffers of a step, and the needs of each position of its serial order, before anything has an offset."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from disco_accel.graph.spaces import HOST
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex
from disco_accel.graph.values import must_survive_step

STEP_START = -1
"""The position of buffers that are there before the first vertex of a step."""

Profile = npt.NDArray[np.int64]
"""Bytes by position."""


@dataclass(slots=True, eq=False)
class PinnedBuffer:
    """``block`` bytes for one value, or for a chain of values each written in place over the one before.

    ``first`` is the position of the first writer (-1: live when the step starts), ``last`` that of the last reader, and
    the number of positions if the value is kept.
    """

    device: int
    block: int
    values: list[Ref]
    first: int
    last: int


@dataclass(slots=True, eq=False)
class SwappableBuffer:
    """A value that may leave the device between uses, of ``size`` bytes, ``block`` with alignment.

    ``uses``: the positions for which it has to be on the device. One that ``starts_on_host`` is ``evictable_from``
    position 0; ``writes``: the positions, among its uses, that change it in place, and ``versions`` its names from
    ``ref`` on. ``outlives_step``: the device's copy is good for the next step too. One that does not is loaded from
    ``evictable_from`` on, behind the kernel that writes it at home; of two steps the second has its own
    ``evictable_from``. An activation stays on the device from its ``producer`` up to before ``evictable_from``, by when
    its offload should have ended; readers in between are not among its ``uses``. ``home``: the space that has it when
    its device has not. ``begin``: where its bytes begin in the value, of which it is a range if ``is_range``.
    ``at``: the offset that it should have if it is on the device when a step starts (-1: any).
    """

    ref: Ref
    device: int
    block: int
    size: int
    uses: list[int]
    starts_on_host: bool
    producer: int = STEP_START
    evictable_from: int = 0
    writes: list[int] = field(default_factory=list)
    versions: list[Ref] = field(default_factory=list)
    outlives_step: bool = True
    begin: int = 0
    is_range: bool = False
    home: int = HOST
    at: int = -1

    @property
    def may_be_resident(self) -> bool:
        """Whether it may be on the device when a step starts."""
        return self.starts_on_host and self.outlives_step


@dataclass(slots=True)
class StepRequirements:
    """``order``: the vertices but for inputs, by position, with the ``seconds`` of each.

    By position, as indices of swappable buffers: ``reads``; ``made``: those that it produces; ``changed``: those that
    it writes over. ``written``: those that it writes at home; ``read_before``: those whose homes it writes over, after
    their reloads. ``used_before[p]``: ids of kernels that used the values which it writes over there. ``devices[p]``:
    where memory changes. Bytes are by device and position; the position after the last is the end of the step.
    ``pinned_bytes``; ``unevictable_bytes``: of activations before they are evictable; ``withheld_bytes``: the part of
    ``pinned_bytes`` that stays free for gaps between buffers. ``derived``: results that depend on none of these bytes,
    shared by requirements that differ in them alone."""

    graph: TaskGraph
    inputs: tuple[Vertex, ...]
    order: tuple[Vertex, ...]
    seconds: list[float]
    align: dict[int, int]
    pinned: list[PinnedBuffer] = field(default_factory=list)
    swappable: list[SwappableBuffer] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    devices: list[tuple[int, ...]] = field(default_factory=list)
    made: dict[int, list[int]] = field(default_factory=dict)
    changed: dict[int, list[int]] = field(default_factory=dict)
    written: dict[int, list[int]] = field(default_factory=dict)
    read_before: dict[int, list[int]] = field(default_factory=dict)
    used_before: dict[int, list[int]] = field(default_factory=dict)
    pinned_bytes: dict[int, Profile] = field(default_factory=dict)
    unevictable_bytes: dict[int, Profile] = field(default_factory=dict)
    withheld_bytes: dict[int, Profile] = field(default_factory=dict)
    derived: dict[Hashable, Any] = field(default_factory=dict)

    def block(self, size: int, device: int) -> int:
        """Return ``size`` rounded up to the alignment of ``device``."""
        align = self.align[device]
        return -(-size // align) * align

    def outlives(self, buffer: SwappableBuffer) -> bool:
        """Whether the user wants an activation when the step has ended."""
        return not buffer.starts_on_host and buffer.producer >= 0 and must_survive_step(self.order[buffer.producer])

    @property
    def vertices(self) -> tuple[Vertex, ...]:
        """All vertices, inputs first."""
        return (*self.inputs, *self.order)

    @property
    def end(self) -> int:
        """The position that stands for the end of the step."""
        return len(self.order)
