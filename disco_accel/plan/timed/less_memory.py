"""A step's requirements for a redraft with less memory, after a draft without offsets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from disco_accel.plan.timed.drafts import Draft, spare_bytes
from disco_accel.plan.timed.step_buffers import Profile, StepRequirements


def with_less_memory(
    draft: Draft, over: Mapping[int, Profile], least: Mapping[int, int], capacity: Mapping[int, int]
) -> StepRequirements | None:
    """Return the draft's requirements with less memory where its buffers lie ``over`` it by so many bytes. That many
    bytes, and at ``least`` so many by device, are taken from the spare memory of each vertex; None if none has any."""
    spare = spare_bytes(draft, capacity)
    cut = {d: np.where(profile > 0, np.maximum(profile, least[d]), 0) for d, profile in over.items()}
    taken = {device: np.minimum(profile, spare[device]) for device, profile in cut.items()}
    if not any(profile.any() for profile in taken.values()):
        return None
    pinned = draft.requirements.pinned_bytes
    with_cut = {device: profile + taken.get(device, 0) for device, profile in pinned.items()}
    withheld = dict(draft.requirements.withheld_bytes)
    withheld |= {d: profile + withheld.get(d, np.zeros_like(profile)) for d, profile in taken.items()}
    return replace(draft.requirements, pinned_bytes=with_cut, withheld_bytes=withheld)
