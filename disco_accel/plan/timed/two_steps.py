"""A step twice in a row: its middle shows what is on the device at a step boundary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from disco_accel.plan.timed.step_buffers import Profile, StepRequirements, SwappableBuffer


def two_steps(requirements: StepRequirements) -> StepRequirements:
    """Return the step twice in a row. Buffers that may be resident are shared; the others of the second step are listed
    last."""
    n, count = requirements.end, len(requirements.swappable)
    buffers: list[SwappableBuffer] = []
    second_step: list[SwappableBuffer] = []
    second_index = {}
    for index, buffer in enumerate(requirements.swappable):
        uses = [use + n for use in buffer.uses]
        if buffer.may_be_resident:
            writes = [*buffer.writes, *(write + n for write in buffer.writes)]
            buffers.append(replace(buffer, uses=buffer.uses + uses, writes=writes))
        else:
            buffers.append(buffer)
            second_index[index] = count + len(second_step)
            # An input of the second step is there from its first kernel on.
            producer = max(0, buffer.producer) + n
            second_step.append(replace(buffer, uses=uses, producer=producer, evictable_from=buffer.evictable_from + n))
    reads = [[second_index.get(buffer, buffer) for buffer in read] for read in requirements.reads]
    made: dict[int, list[int]] = {}
    for position, outputs in requirements.made.items():
        made.setdefault(max(0, position) + n, []).extend(second_index[i] for i in outputs)
    changed = {position + n: buffers for position, buffers in requirements.changed.items()}
    # Only buffers that are not shared by both steps are used at home.
    written, read_before = (
        {position + n: [second_index[i] for i in buffers] for position, buffers in table.items()}
        for table in (requirements.written, requirements.read_before)
    )
    return replace(
        requirements,
        order=requirements.order * 2,
        seconds=requirements.seconds * 2,
        pinned=[],
        swappable=buffers + second_step,
        reads=requirements.reads + reads,
        devices=requirements.devices * 2,
        made={**requirements.made, **made},
        changed={**requirements.changed, **changed},
        written={**requirements.written, **written},
        read_before={**requirements.read_before, **read_before},
        pinned_bytes=bytes_twice(requirements.pinned_bytes, n),
        unevictable_bytes=bytes_twice(requirements.unevictable_bytes, n),
        derived={},
    )


def bytes_twice(profiles: Mapping[int, Profile], end: int) -> dict[int, Profile]:
    """Return bytes by device and position of two steps of ``end`` positions, with those of the second's end."""
    return {device: np.concatenate([profile[:end], profile]) for device, profile in profiles.items()}
