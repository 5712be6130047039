"""A step that ended early: why, and what it has changed and not brought home."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from disco_accel.execute.planned_states import PlannedStates
from disco_accel.execute.state_homes import StateHomes
from disco_accel.execute.vertex_names import Unfinished
from disco_accel.graph.memgraph import MemGraph
from disco_accel.native.engine_numbers import EngineStatus


@dataclass(frozen=True, slots=True)
class EngineError:
    """Why a step ended early. ``position`` of the vertex, -1 if none can be named.

    ``later``: the device found it after the launch; ``lost``: it refuses all further work; ``draining``: something is
    in flight that does not end.
    """

    status: EngineStatus
    position: int
    message: str
    later: bool
    lost: bool
    draining: bool
    left: Unfinished


def bring_home(
    graph: MemGraph,
    states: PlannedStates,
    ran: Sequence[bool],
    arenas: Mapping[int, torch.Tensor],
    homes: StateHomes,
) -> frozenset[int]:
    """Write each host-updated state home whose last version is on its device alone; return those that have it at home.

    ``ran``, by position: whether a vertex has run to its end. The homes of other states, if a step changes them once,
    have their first version: nothing is written there before the kernel has ended, nor over what that made before the
    copy home has.
    """
    position = {vertex.id: i for i, vertex in enumerate(graph.vertices)}
    offloads = {states.version[v.id, 0]: v.id for v in reversed(graph.vertices) if states.stores(v)}
    done = set()
    for state in states.host_updated:
        last = states.last[state]
        if not ran[position[last[0]]]:
            continue
        if not ran[position[offloads[last]]]:
            slot, size = graph.slots[last], graph.vertices[position[last[0]]].sizes[last[1]]
            homes.write(state, arenas[slot.space][slot.offset : slot.offset + size])
        done.add(state)
    return frozenset(done)
