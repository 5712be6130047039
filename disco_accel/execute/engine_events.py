"""The events of a traced step, one for each vertex."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from disco_accel.graph.memgraph import MemGraph
from disco_accel.native.engine_numbers import CopyLane


@dataclass(frozen=True, slots=True)
class Event:
    """One vertex of a traced step. ``lane`` is ``compute<n>``, ``h2d``, ``d2h`` or ``p2p`` of device ``device``.

    Times are seconds from begin: ``ready`` when its last predecessor ended (look-ahead may issue a kernel before that),
    ``issue`` when the engine handed it to the device, which ran it from ``start`` to ``end``. A transfer is on the
    ``p2p`` lane of its source; one to a device in host memory is on the ``d2h`` lane of its source, one from there on
    the ``h2d`` lane of its target.
    """

    vertex: int
    lane: str
    issue: float
    start: float
    end: float
    bytes: int
    device: int = 0
    ready: float = 0.0


def events_of(table: torch.Tensor, plan: MemGraph, compute_streams: int) -> list[Event]:
    """The rows of ``EVENT_COLUMNS`` of a step of ``plan``; a device in host memory has one compute stream."""
    ids = [vertex.id for vertex in plan.vertices]
    copies = [lane.name.lower() for lane in CopyLane]
    streams = [1 if device.is_host_device else compute_streams for device in plan.devices]
    lanes = [[*(f"compute{i}" for i in range(count)), *copies] for count in streams]
    return [
        Event(
            ids[v],
            lanes[device][stream],
            issue * 1e-9,
            start * 1e-9,
            end * 1e-9,
            nbytes,
            plan.devices[device].id,
            ready * 1e-9,
        )
        for v, device, stream, issue, start, end, nbytes, ready in table.tolist()
    ]
