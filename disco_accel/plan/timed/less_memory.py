"""A step's requirements where a draft has to do with less memory, since its buffers found no offsets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from disco_accel.plan.timed.drafts import Draft, spare_bytes
from disco_accel.plan.timed.step_buffers import Profile, StepRequirements

Cut = Mapping[int, Profile]
"""By device and position: bytes that the draft is to leave free."""


def cuts_of(over: Cut, least: Mapping[int, int], everywhere: Sequence[int] = ()) -> list[dict[int, Profile]]:
    """Return what may be cut where buffers lie ``over`` the memory: there, and at ``least`` so many bytes by device;
    and, for each part in ``everywhere``, that part of the largest overflow at every position."""
    cuts = [{d: np.where(profile > 0, np.maximum(profile, least[d]), 0) for d, profile in over.items()}]
    for each in everywhere:
        cuts.append({device: np.full_like(profile, profile.max() // each) for device, profile in over.items()})
    return cuts


def with_less_memory(draft: Draft, cut: Cut, capacity: Mapping[int, int]) -> StepRequirements | None:
    """Return the draft's requirements with ``cut`` taken from the memory, as far as each vertex can do without it; None
    if that is nowhere."""
    spare = spare_bytes(draft, capacity)
    taken = {device: np.minimum(profile, spare[device]) for device, profile in cut.items()}
    if not any(profile.any() for profile in taken.values()):
        return None
    pinned = draft.requirements.pinned_bytes
    with_cut = {device: profile + taken.get(device, 0) for device, profile in pinned.items()}
    withheld = dict(draft.requirements.withheld_bytes)
    withheld |= {d: profile + withheld.get(d, np.zeros_like(profile)) for d, profile in taken.items()}
    return replace(draft.requirements, pinned_bytes=with_cut, withheld_bytes=withheld)
