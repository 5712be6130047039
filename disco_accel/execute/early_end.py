"""A step that ended early: why, how messages say it, and the states that it has changed and not brought home."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from disco_accel.errors import DeviceLost, ExecutionError, Stalled
from disco_accel.execute.state_homes import StateHomes
from disco_accel.execute.vertex_names import Describer
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.native.engine_class import Engine
from disco_accel.native.engine_numbers import EngineStatus

HUNG = "the device has not ended that work since, so this process cannot go on: end it and look at the device"
_LOST = (
    "after such an error CUDA refuses all further work of this process: start it again, from its last checkpoint. Set "
    "CUDA_LAUNCH_BLOCKING=1 to learn which op it was, or run it under compute-sanitizer"
)


@dataclass(frozen=True, slots=True)
class EngineError:
    """Why a step ended early; vertices by position in serial order. ``position``: -1 if no vertex can be named.

    ``later``: the device found it after the launch; ``lost``: it refuses all further work; ``draining``: something is
    in flight that does not end. ``in_flight``: the first of ``in_flight_count`` vertices. ``waiting``: the first of
    ``waiting_count`` that were not launched, one after the other, each behind it a predecessor that had not finished,
    -1 for none.
    """

    status: int
    position: int
    message: str
    later: bool
    lost: bool
    draining: bool
    in_flight: Sequence[int]
    in_flight_count: int
    waiting: Sequence[int]
    waiting_count: int


def last_error(engine: Engine) -> EngineError:
    """Why the last step of ``engine`` ended early."""
    return EngineError(*engine.last_error())


def stalled(error: EngineError, describer: Describer, ended: bool) -> Stalled:
    """The exception for a step without progress: ``in flight 1: vertex 7 (..); waiting 2: vertex 8 (..) for vertex 7``.
    ``ended``: the device has ended its work since."""
    at = describer.at
    pairs = zip(error.waiting[::2], error.waiting[1::2], strict=True)
    waiting = (at(vertex) + (f" for {at(on)}" if on >= 0 else "") for vertex, on in pairs)
    told = (
        f"{error.message}; in flight {error.in_flight_count}: {', '.join(map(at, error.in_flight)) or 'none'}; "
        f"waiting {error.waiting_count}: {', '.join(waiting) or 'none'}"
    )
    return Stalled(f"the step stopped making progress: {told}" + ("" if ended else f"; {HUNG}"))


def failure(error: EngineError, graph: MemGraph, describer: Describer) -> ExecutionError:
    """The exception for a step of ``graph`` that failed, or that was ended otherwise."""
    flying = ", ".join(map(describer.at, error.in_flight))
    more = error.in_flight_count - len(error.in_flight)
    flying += f" and {more} more" if more > 0 else ""
    told = f"{error.message}; in flight: {flying}" if flying else error.message
    if error.lost:
        return DeviceLost(f"{told}; {_LOST}")
    if error.later:
        return ExecutionError(f"the step failed on the device: {told}")
    if error.position < 0:
        return ExecutionError(f"the step was ended early: {error.message}")
    vertex = graph.vertices[error.position]
    # The op's own message already begins with its name and module.
    is_kernel = vertex.kind is VertexKind.KERNEL
    detail = error.message if is_kernel else f"{describer.what(vertex)}: {error.message}"
    return ExecutionError(f"vertex {vertex.id} failed: {detail}")


def failed_vertex(error: EngineError, graph: MemGraph) -> int | None:
    """Id of the vertex whose failure ended a step of ``graph``; None if it was ended otherwise, or nobody knows."""
    known = error.status == EngineStatus.FAILED and error.position >= 0
    return graph.vertices[error.position].id if known else None


def bring_home(
    graph: MemGraph, ran: Sequence[bool], arenas: Mapping[int, torch.Tensor], homes: StateHomes
) -> frozenset[int]:
    """Write each host-updated state home whose last version is on its device alone; return those that have it at home.

    ``ran``, by position: whether a vertex has run to its end. The homes of other states, if a step changes them once,
    have their first version: nothing is written there before the kernel has ended, nor over its result before the copy
    home has.
    """
    states = homes.planned
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
