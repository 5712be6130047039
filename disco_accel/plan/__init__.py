"""From a TaskGraph to a MemGraph: addresses, offloads, reloads and the edges that make any execution order safe."""

from disco_accel.eviction import POLICIES
from disco_accel.plan.select import PLANNERS, make_plan
from disco_accel.simulate.simulator import Machine

__all__ = ["PLANNERS", "POLICIES", "Machine", "make_plan"]
