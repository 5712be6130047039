"""Which weights the step's own device updates, and which the processors: by measured seconds, in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from disco_accel.execute.engine_options import EngineOptions
from disco_accel.graph.spaces import TO_DEVICE
from disco_accel.graph.taskgraph import OpCall, TaskGraph, with_memory
from disco_accel.measure.record import OpRecord, measurements, record
from disco_accel.native.backend import backend_of, run_device
from disco_accel.plan.update_places import choose
from disco_accel.simulate.machine import Machine
from disco_accel.step.update.pending_update import ParameterUpdate
from disco_accel.step.update.update_pass import UpdatedStep, samples, with_updates

_PART_OF_ARENA = 16
"""A weight that is larger than this part of the arena is updated by the processors: its update on the device takes
weight, gradient, moments and master there at once."""

_SIMULATED = 400_000
"""Vertices that are simulated for one choice, in all. Not tuned: it bounds the time of a choice for large graphs."""

_ARENAS = (1, 2)
"""Parts of the arena that plans with updates on the device are made for. One for half of it has fewer kernels that wait
for the bytes of state on its way home. Simulated steps of 7B at 1 x 2048 in 22 GiB take 2.27 s instead of 2.79."""

UpdatePlaces = tuple[frozenset[int], int]
"""Parts to update on the device, and the bytes of the arena of such a plan."""

Measure = Callable[[TaskGraph, frozenset[int]], Mapping[int, OpRecord]]
"""Records of some kernels of a graph, by id."""


@dataclass
class UpdateChoice:
    """Updates of ``weights``, INPUTs of ``graph``, by ``parts``. ``device_lr``: as in ``with_updates``. Each kind of
    kernel is measured once."""

    graph: TaskGraph
    weights: Sequence[int]
    parts: Sequence[ParameterUpdate]
    device_lr: str
    measure: Measure
    _known: dict[tuple[bool, OpCall], OpRecord] = field(default_factory=dict)

    @classmethod
    def of(
        cls, engine: EngineOptions, graph: TaskGraph, weights: Sequence[int], parts: Sequence[ParameterUpdate]
    ) -> UpdateChoice:
        """Of weights of a step of ``graph``, measured as ``engine`` runs its kernels."""

        def measure(graph: TaskGraph, only: frozenset[int]) -> dict[int, OpRecord]:
            own, host = engine.compute_threads, engine.host_threads
            return record(graph, device=engine.device, compute_threads=own, host_threads=host, only=only)

        return cls(graph, weights, parts, backend_of(run_device(engine.device)).rate_dtype, measure)

    def placed(self, on_device: Collection[int] = ()) -> UpdatedStep:
        """The step with the updates of the parts ``on_device`` there, without its kernels' seconds."""
        return with_updates(self.graph, self.weights, self.parts, on_device, self.device_lr)

    def records(self, step: UpdatedStep) -> dict[int, OpRecord]:
        """By kernel of the updates."""
        graph, stands_for = samples(step)
        on_host = {kernel.id: kernel.on_host for kernel in step.kernels}
        key = {sample: (on_host[kernel], graph.ops[sample]) for kernel, sample in stands_for.items()}
        missing = frozenset(sample for sample, each in key.items() if each not in self._known)
        measured = self.measure(graph, missing) if missing else {}
        self._known |= {key[sample]: each for sample, each in measured.items()}
        return {kernel: self._known[key[sample]] for kernel, sample in stands_for.items()}

    def timed(self, on_device: Collection[int]) -> TaskGraph:
        """The graph of ``placed`` with its kernels' seconds."""
        step = self.placed(on_device)
        return measurements(self.records(step)).run(step.graph)

    def choices(self, update_on: str, machine: Machine) -> list[UpdatePlaces]:
        """Plans are to be made of each; those with updates on the device first, the last is without any."""
        whole = self.graph.devices[0].memory
        made: list[UpdatePlaces] = []
        if update_on == "device":
            made.append((frozenset(self._allowed(whole)), whole))
        elif update_on == "auto":
            sizes = dict.fromkeys(whole // part for part in _ARENAS)
            made += [(self._faster_on_device(size, machine), size) for size in sizes]
        return [*(choice for choice in made if choice[0]), (frozenset(), whole)]

    def _allowed(self, arena: int) -> list[int]:
        return [i for i, part in enumerate(self.parts) if part.parameter.nbytes * _PART_OF_ARENA <= arena]

    def _faster_on_device(self, arena: int, machine: Machine) -> frozenset[int]:
        allowed = self._allowed(arena)
        if not allowed:
            return frozenset()

        def with_updates_of(on_device: Collection[int]) -> TaskGraph:
            return with_memory(self.timed(on_device), lambda _: arena)

        on_host, *_ = choose(
            allowed,
            lambda here: with_updates_of([i for i in allowed if i not in here]),
            machine,
            self._balanced(allowed, machine),
            tries=max(8, _SIMULATED // len(self.timed(allowed).vertices)),
        )
        return frozenset(allowed) - on_host.on_host

    def _balanced(self, allowed: Sequence[int], machine: Machine) -> float:
        """Share of the updates for the processors with which these and the link to the device work equally long."""
        step = self.placed()
        seconds = self.records(step)
        host = sum(seconds[kernel.id].seconds for kernel in step.kernels if kernel.part in allowed)
        parts = [self.parts[i] for i in allowed]
        moved = sum(tensor.nbytes for part in parts for tensor in (part.gradient, *part.changed[1:]))
        link = moved / machine.link(TO_DEVICE).bandwidth
        return link / (link + host) if link + host else 1.0
