"""Facts about a value that no step changes: its lifetime, access and arrival. Planners, judges, the simulator and the
engine ask about them through ``graph/values.py``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class _Lifetime(enum.StrEnum):
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
    """Of the value of an INPUT; a value that a vertex makes has those of ``PER_STEP`` but for its arrival.

    ``stays``: of a value that the host has, it is on its device all the time: no cyclic plan lets it leave.
    ``host_updated``: the host reads such a value and writes another content between two steps: a device's copy is good
    for one step, and the home has the last version when a step has ended.
    """

    lifetime: _Lifetime = _Lifetime.STEP
    access: Access = Access.READ_WRITE
    arrival: Arrival = Arrival.START
    stays: bool = False
    host_updated: bool = False

    def contradiction(self) -> tuple[str, str] | None:
        """The field that cannot be together with the others, and why; None if the traits make sense."""
        if self.lifetime is _Lifetime.STEPS and self.arrival is not Arrival.START:
            return "arrival", "a value that lives from step to step is there when one starts: start"
        if self.stays and not self.host_has_it:
            return "stays", "only a value that lives over steps and is not foreign can be made to stay"
        if self.host_updated and (not self.host_has_it or self.stays):
            return (
                "host_updated",
                "only a value that lives over steps, that is not foreign and that may leave can be so",
            )
        return None

    @property
    def host_has_it(self) -> bool:
        """Whether the value's home on the host holds it when a step starts."""
        return self.lifetime is _Lifetime.STEPS and self.access is not Access.FOREIGN

    @property
    def changes_over_steps(self) -> bool:
        """Whether kernels may change it and the next step starts with their last version."""
        return self.host_has_it and self.access is Access.READ_WRITE


PER_STEP = Traits()
"""Given to each step anew."""

LATE = Traits(arrival=Arrival.GATE)
"""Given to each step anew, at the gate."""

FROZEN = Traits(_Lifetime.STEPS, Access.READ)
"""The host has it, and nothing changes it: weights that are not trained."""

HOST_UPDATED = Traits(_Lifetime.STEPS, Access.READ, host_updated=True)
"""The host has it, kernels read it alone, and the host changes it between steps: weights that an optimizer updates
there."""

STATE = Traits(_Lifetime.STEPS, Access.READ_WRITE)
"""The host has it when a step starts, kernels change it, and the next step starts with their last version."""

HOST_UPDATED_STATE = Traits(_Lifetime.STEPS, Access.READ_WRITE, host_updated=True)
"""As a state, but at its home between two steps, where the host uses it too: weights that an optimizer's step
changes."""

FOREIGN = Traits(_Lifetime.STEPS, Access.FOREIGN)
"""In the user's memory."""

LATE_FOREIGN = Traits(_Lifetime.STEP, Access.FOREIGN, Arrival.GATE)
"""In the user's memory, from the gate on."""

MADE = Traits(arrival=Arrival.MADE)
"""Made by a vertex in each step anew."""

MADE_FOREIGN = Traits(_Lifetime.STEP, Access.FOREIGN, Arrival.MADE)
"""Written by a transfer to the user's memory: gradients for an optimizer on the host."""
