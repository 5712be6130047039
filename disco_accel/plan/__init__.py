"""From a TaskGraph to a MemGraph: addresses, offloads, reloads and the edges that make any execution order safe."""

from disco_accel.plan.evict import POLICIES
from disco_accel.plan.make import PLANNERS, make_plan
from disco_accel.plan.simulate import Machine

__all__ = ["PLANNERS", "POLICIES", "Machine", "make_plan"]
