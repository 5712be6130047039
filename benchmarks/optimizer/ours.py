"""Our schedules of the study's step: where each piece is updated, and when; planned, verified, in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from benchmarks.optimizer.least import Least, least_seconds
from benchmarks.optimizer.step_graph import KEEP, UPDATE, StepOptions, kernels_named, pieces_of, step_graph
from benchmarks.optimizer.study import STATE, WEIGHT, Study
from benchmarks.optimizer.timing import Mix, first_mix, neighbours, options_of
from benchmarks.optimizer.update_order import Pace, paced
from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph, Vertex
from disco_accel.plan import make_plan
from disco_accel.plan.update_places import balanced_share, choose, placed, spread, updates_of
from disco_accel.simulate.simulator import Machine, Simulator
from disco_accel.verify.static import verify

PLACES = ("host", "device", "half", "chosen", "timed")
"""``half``: every other piece on the processors, whatever the machine; ``chosen``: as ``update_places`` does;
``timed``: time chosen with the place, and which states stay on the device."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """One way to run the step. ``places``: one of ``PLACES``; with ``timed`` ``deferred`` says nothing."""

    places: str
    clip: bool
    deferred: bool = False
    pieces: int = 3


_STEPS = 4

_LINK_FOR_STATES = 10 / 11
"""Share of the link's rate at which states are taken to reach the device: updated weights take the rest."""

_STATES_AHEAD = 2.4
"""Pieces whose states are on the device, beside those that stay, when the first is updated."""

_PLANS = 12
"""Mixes that are planned for one choice of places and times."""

BEST = (Schedule("timed", clip=False), Schedule("timed", clip=True, deferred=True))
"""Without clipping, and with."""

_GIVEN_TIMES = tuple(places for places in PLACES if places != "timed")

SCHEDULES = (
    *(Schedule(places, clip, head) for clip in (False, True) for head in (False, True) for places in _GIVEN_TIMES),
    *BEST,
)


@dataclass(frozen=True, slots=True)
class Planned:
    """``on_host``: numbers of the pieces that the processors update; ``period``: seconds of a step among others."""

    schedule: Schedule
    graph: TaskGraph
    plan: MemGraph
    machine: Machine
    on_host: frozenset[int]
    share_on_device: float
    period: float


def planned(study: Study, schedule: Schedule, least: Least | None = None) -> Planned:
    """Choose places, plan for steps one after the other, and verify. Raises BudgetTooSmall, VerifyError.

    ``least``: what a choice of places and times begins with; None: it is looked for.

    Where several choices are expected to be good, each gets a plan, and the fastest is returned.
    """
    if schedule.places == "timed":
        return _timed(study, schedule, least or least_seconds(study, clip=schedule.clip))
    build = builder(study, schedule)
    return min((_plan(study, schedule, build(each), each) for each in _choices(study, schedule, build)), key=_period)


def _choices(
    study: Study, schedule: Schedule, build: Callable[[frozenset[int]], TaskGraph]
) -> Iterator[frozenset[int]]:
    """Numbers of the pieces that the processors update."""
    numbers = [piece.number for piece in pieces_of(study, schedule.pieces)]
    if schedule.places == "chosen":
        machine, here = study.machine.pinned_links(), build(frozenset())
        share = balanced_share(here, _host_seconds(study, here), machine)
        yield from (places.on_host for places in choose(numbers, build, machine, share))
    else:
        count = {"host": len(numbers), "device": 0, "half": len(numbers) // 2}[schedule.places]
        yield frozenset(spread(numbers, count))


def _timed(study: Study, schedule: Schedule, least: Least) -> Planned:
    """The fastest mix of a search by steps, with the processors' share of the lower bound to begin with."""
    count = len(pieces_of(study, schedule.pieces))
    tried: dict[StepOptions, Planned | BudgetTooSmall] = {}

    def attempt(mix: Mix) -> float:
        options = options_of(study, schedule.pieces, mix, clip=schedule.clip)
        if options not in tried and len(tried) < _PLANS:
            try:
                tried[options] = _plan(study, schedule, timed_graph(study, options), frozenset(options.on_host))
            except BudgetTooSmall as refused:
                # Too many states that stay.
                tried[options] = refused
        made = tried.get(options)
        return made.period if isinstance(made, Planned) else float("inf")

    best = first_mix(study, schedule.pieces, least, clip=schedule.clip)
    seconds, better = attempt(best), True
    while better:
        better = False
        for near in neighbours(best, count, clip=schedule.clip):
            if attempt(near) < seconds:
                best, seconds, better = near, attempt(near), True
                break
    found = [made for made in tried.values() if isinstance(made, Planned)]
    if not found:
        raise min((made for made in tried.values() if isinstance(made, BudgetTooSmall)), key=lambda made: made.needed)
    return min(found, key=_period)


def timed_graph(study: Study, options: StepOptions) -> TaskGraph:
    """The step with updates in the places and at the times of ``options``."""
    graph = step_graph(study, options)
    by_piece = _by_piece(graph)
    here = {number: update for number, update in by_piece.items() if number not in options.on_host}
    streamed = {update for number, update in here.items() if number not in (options.stays or ())}
    state = STATE * study.model.layer / options.pieces
    pace = Pace(_LINK_FOR_STATES * study.machine.pinned, _STATES_AHEAD * state)
    return _on_host(study, paced(graph, set(here.values()), streamed, pace), options)


def _plan(study: Study, schedule: Schedule, graph: TaskGraph, on_host: frozenset[int]) -> Planned:
    machine = study.machine.pinned_links()
    plan = make_plan(graph, planner="timed", cyclic=True, machine=machine)
    verify(graph, plan)
    there = sum(piece.parameters for piece in pieces_of(study, schedule.pieces) if piece.number not in on_host)
    period = steady_seconds(plan, machine)
    return Planned(schedule, graph, plan, machine, on_host, there / study.model.parameters, period)


def _period(made: Planned) -> float:
    return made.period


def steady_seconds(plan: MemGraph, machine: Machine) -> float:
    """Of a step among others."""
    simulator = Simulator(plan, machine)
    return (simulator.run(steps=_STEPS).makespan - simulator.run().makespan) / (_STEPS - 1)


def builder(study: Study, schedule: Schedule) -> Callable[[frozenset[int]], TaskGraph]:
    """Return the function from numbers of pieces that the processors update to the step's graph."""
    deferred = frozenset(piece.number for piece in pieces_of(study, schedule.pieces) if schedule.deferred)
    options = StepOptions(pieces=schedule.pieces, clip=schedule.clip, deferred=deferred)
    if schedule.deferred:
        return lambda on_host: _deferred(study, replace(options, on_host=on_host))
    graph = step_graph(study, options)
    seconds = _host_seconds(study, graph)
    by_piece = _by_piece(graph)
    return lambda on_host: placed(graph, {by_piece[number]: seconds[by_piece[number]] for number in sorted(on_host)})


def _deferred(study: Study, options: StepOptions) -> TaskGraph:
    return _on_host(study, step_graph(study, options), options)


def _on_host(study: Study, graph: TaskGraph, options: StepOptions) -> TaskGraph:
    seconds, by_piece = _host_seconds(study, graph), _by_piece(graph)
    moved = {by_piece[number]: seconds[by_piece[number]] for number in sorted(options.on_host)}
    # The transfer brings the gradient to its place; that it stays there takes no time.
    moved |= {vertex.id: 0.0 for vertex in kernels_named(graph, KEEP)}
    return placed(graph, moved)


def _by_piece(graph: TaskGraph) -> Mapping[int, int]:
    """Number of a piece → its update: weights are listed piece by piece."""
    number = {vertex.id: i for i, vertex in enumerate(v for v in graph.vertices if v.op == "weight")}
    return {number[update.inputs[0][0]]: update.id for update in kernels_named(graph, UPDATE)}


def _host_seconds(study: Study, graph: TaskGraph) -> dict[int, float]:
    def seconds(vertex: Vertex) -> float | None:
        return study.machine.host_seconds(vertex.sizes[0] // WEIGHT) if vertex.op == UPDATE else None

    return updates_of(graph, seconds)
