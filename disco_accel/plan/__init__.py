"""From a TaskGraph to a MemGraph: addresses, offloads, reloads and the edges that make any execution order safe."""

from disco_accel.plan.make import make_plan
from disco_accel.plan.simulate import Machine

__all__ = ["Machine", "make_plan"]
