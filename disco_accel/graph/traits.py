"""What holds of a value whatever happens to it in a step: how long it lives, who may change it, when it arrives.

``graph/values.py`` answers what planners, judges, the simulator and the engine ask about it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Lifetime(enum.StrEnum):
    """STEP: made, or brought, in each step. STEPS: goes on from step to step, at its home in between."""

    STEP = "step"
    STEPS = "steps"


class Access(enum.StrEnum):
    """READ: no kernel changes it. READ_WRITE: kernels may write new versions. FOREIGN: memory that is not the plan's,
    whose pointer is looked up at each run."""

    READ = "read"
    READ_WRITE = "read-write"
    FOREIGN = "foreign"


class Arrival(enum.StrEnum):
    """Where a value comes from: there when the step STARTs, brought at the GATE, or MADE by a vertex."""

    START = "start"
    GATE = "gate"
    MADE = "made"


@dataclass(frozen=True, slots=True)
class Traits:
    """Of the value of an INPUT; a value that a vertex makes has those of ``BROUGHT`` but for its arrival."""

    lifetime: Lifetime = Lifetime.STEP
    access: Access = Access.READ_WRITE
    arrival: Arrival = Arrival.START


BROUGHT = Traits()
"""Given to each step anew."""

LATE = Traits(arrival=Arrival.GATE)
"""Given to each step anew, at the gate."""

FROZEN = Traits(Lifetime.STEPS, Access.READ)
"""The host has it, and nothing changes it: weights that are not trained."""

STATE = Traits(Lifetime.STEPS, Access.READ_WRITE)
"""The host has it when a step starts, kernels change it, and the next step starts with what they made of it."""

FOREIGN = Traits(Lifetime.STEPS, Access.FOREIGN)
"""In the user's memory."""

LATE_FOREIGN = Traits(Lifetime.STEP, Access.FOREIGN, Arrival.GATE)
"""In the user's memory, from the gate on."""

TRAITS = (BROUGHT, LATE, FROZEN, STATE, FOREIGN, LATE_FOREIGN)
