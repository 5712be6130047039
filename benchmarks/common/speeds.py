"""The speeds of a simulated device as result files have them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from disco_accel.graph.spaces import ROUTE_OF
from disco_accel.simulate.roofline import Speed


def speed_as_json(speed: Speed) -> dict[str, Any]:
    """Return ``speed`` with the links of its machine by name."""
    machine = speed.machine
    links = {name: asdict(machine.link(ROUTE_OF[name])) for name in ("h2d", "d2h", "p2p")}
    return asdict(speed) | {"machine": {"compute_streams": machine.compute_streams, **links, "joint": machine.joint}}
