"""The least seconds of the study's step, wherever and whenever each update runs: a relaxation, as a linear program.

A steady step is a ring of slots, one for each layer's forward and backward in each micro-batch, in the order of the
graph. A slot lasts from the start of its first kernel to the start of the next slot's; all of them together are the
step. What is chosen, in fractions of a layer: how much of its update the processors do and how much the device, in
which slots, and which bytes are copied in which slots. What no schedule escapes:

- A slot lasts at least as long as its kernels and the updates that the device runs in it, as the processors work in
  it, and as each direction of the link copies in it.
- An update runs after the last gradient of its layer, with clipping after that of all layers, and before the next
  step's forward reads the weight. The processors need the gradient there, and what they made has to be loaded.
- The device needs the state, which was loaded or has stayed since the last update; what leaves is written back.
- At the start of each slot the weights that it reads, gradients, states and both versions of a weight fit the device.

Left out, so that this is a bound: activations, a copy's latency, whole pieces, the order inside of a slot, and the
write-back of weights that the device made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.optimizer.linear_program import LinearProgram, Term
from benchmarks.optimizer.step_graph import pieces_of
from benchmarks.optimizer.study import GRADIENT, STATE, WEIGHT, Study

_GIGA = 1e9
"""Bytes and parameters are counted in these: the solver's tolerances are absolute."""


@dataclass(frozen=True, slots=True)
class Least:
    """``seconds``: of a step among others; ``on_host``: share of the parameters that the processors update then."""

    seconds: float
    on_host: float


def least_seconds(study: Study, *, clip: bool) -> Least:
    """No plan of the study's step is faster, with its kernels of forward and backward in the order of the graph."""
    return _Ring(study, clip).solve()


@dataclass(frozen=True, slots=True)
class _Window:
    """Slots of one layer, from the start of a step on, beyond its end in the next one: ``start`` to ``end`` (not
    included) those in which it may be updated. ``uses``: those that read its weights; ``made`` and ``final``: those in
    which its gradient is made and the last one is added."""

    start: int
    end: int
    uses: tuple[int, ...]
    made: int
    final: int


class _Ring:
    def __init__(self, study: Study, clip: bool) -> None:
        self.study, self.clip = study, clip
        self.layers = [piece.parameters / _GIGA for piece in pieces_of(study, 1)]
        self.program = LinearProgram()
        self.seconds = self._slots()
        self.count = len(self.seconds)
        self.lasts = [self.program.variable(least=seconds, cost=1.0) for seconds in self.seconds]
        self.compute, self.host, self.loads, self.backs, self.held = (
            [list[Term]() for _ in self.seconds] for _ in range(5)
        )
        """By slot: what fills it, and the bytes on the device when it starts."""
        self.on_host: list[int] = []

    def _slots(self) -> list[float]:
        """Seconds of the kernels of each: embedding, layers and output layer with its backward, then back."""
        study, last = self.study, len(self.layers) - 1
        computing = sum(self.layers[1:])
        forward = study.measured.forward / computing
        gradients = (study.measured.backward - study.measured.forward) / computing
        there = [0.0, *(forward * each for each in self.layers[1:last])]
        # The output layer's kernels that others recompute are part of its gradients.
        turn = self.layers[last] * (2 * forward + gradients)
        back = [(forward + gradients) * each for each in self.layers[last - 1 : 0 : -1]]
        return [*there, turn, *back, 0.0] * study.model.accumulation

    def _window(self, layer: int) -> _Window:
        last = len(self.layers) - 1
        each = 2 * last + 1
        begins = [each * micro_batch for micro_batch in range(self.study.model.accumulation)]
        forward = [begin + layer for begin in begins]
        backward = [begin + 2 * last - layer for begin in begins]
        reads = forward if layer in (0, last) else [*forward, *backward]
        start = self.count - 1 if self.clip else backward[-1]
        return _Window(start, self.count + forward[0], tuple(sorted(reads)), backward[0], backward[-1])

    def solve(self) -> Least:
        """Write the program down and solve it."""
        for layer in range(len(self.layers)):
            self._layer(layer)
        machine, program = self.study.machine, self.program
        rate, memory = machine.pinned / _GIGA, machine.memory / _GIGA
        for slot, lasts in enumerate(self.lasts):
            program.at_most([*self.compute[slot], (-1.0, lasts)], -self.seconds[slot])
            program.at_most([*self.host[slot], (-1.0, lasts)], 0.0)
            program.at_most([*self.loads[slot], (-rate, lasts)], 0.0)
            program.at_most([*self.backs[slot], (-rate, lasts)], 0.0)
            program.at_most(self.held[slot], memory)
        seconds, values = program.solve()
        return Least(seconds, sum(values[each] for each in self.on_host) / sum(self.layers))

    def _layer(self, layer: int) -> None:
        size, window, machine = self.layers[layer], self._window(layer), self.study.machine
        here: dict[int, int] = {}
        there: dict[int, int] = {}
        for slot in range(window.start, window.end):
            here[slot], there[slot] = self.program.variable(), self.program.variable()
            self.compute[slot % self.count].append((machine.device_seconds(1) * _GIGA, here[slot]))
            self.host[slot % self.count].append((machine.host_seconds(1) * _GIGA, there[slot]))
        share = self.program.variable(most=size)
        self.on_host.append(share)
        self.program.equal([(-1.0, share), *((1.0, each) for each in there.values())], 0.0)
        self.program.equal([(1.0, share), *((1.0, each) for each in here.values())], size)
        self._state(window, here)
        self._weight(window, WEIGHT * size, here, there)
        self._gradient(window, GRADIENT * size, here, there)

    def _copy(self, lane: list[list[Term]], slot: int) -> int:
        copied = self.program.variable()
        lane[slot % self.count].append((1.0, copied))
        return copied

    def _hold(self, slot: int, *held: int) -> None:
        self.held[slot % self.count] += ((1.0, each) for each in held)

    def _state(self, window: _Window, here: Mapping[int, int]) -> None:
        """Bytes of the state that wait for the update of this step, and those that have had it."""
        old, new = ([self.program.variable() for _ in range(self.count)] for _ in range(2))
        for slot in range(window.start, window.start + self.count):
            at, then = slot % self.count, (slot + 1) % self.count
            load, back = self._copy(self.loads, slot), self._copy(self.backs, slot)
            updated = [(float(STATE), here[slot])] if slot in here else []
            gone = [(-factor, variable) for factor, variable in updated]
            if slot + 1 < window.start + self.count:
                self.program.equal([(1.0, old[then]), (-1.0, old[at]), (-1.0, load), *updated], 0.0)
                self.program.equal([(1.0, new[then]), (-1.0, new[at]), (1.0, back), *gone], 0.0)
            else:
                # From here on all that is there waits for the next update.
                kept = [(-1.0, old[at]), (-1.0, load), (-1.0, new[at]), (1.0, back)]
                self.program.equal([(1.0, old[then]), *kept], 0.0)
                self.program.equal([(1.0, new[then])], 0.0)
            self._hold(slot, old[at], new[at])

    def _weight(self, window: _Window, size: float, here: Mapping[int, int], there: Mapping[int, int]) -> None:
        """Both versions: bytes of the old one that the device has, whole where they are read and there for its
        updates; bytes of the new one, made by these or loaded once the processors have made them."""
        program, first, last = self.program, window.uses[0], window.uses[-1]
        old = {
            slot: program.variable(least=size if slot in window.uses else 0.0, most=size)
            for slot in range(first, last + 1)
        }
        for slot in range(first, last):
            self._hold(slot, old[slot])
            load = self._copy(self.loads, slot)
            program.at_most([(1.0, old[slot + 1]), (-1.0, old[slot]), (-1.0, load)], 0.0)
        self._hold(last, old[last])
        old_at, new_at = old[last], program.variable(most=0.0)
        made: list[Term] = []
        for slot in range(last, window.end):
            old_then = program.variable(most=size)
            new_then = old[first] if slot + 1 == window.end else program.variable(most=size)
            load, arrival = self._copy(self.loads, slot), self._copy(self.loads, slot)
            updated = [(float(WEIGHT), here[slot])] if slot in here else []
            gone = [(-factor, variable) for factor, variable in updated]
            program.at_most([(1.0, old_then), (-1.0, old_at), (-1.0, load), *updated], 0.0)
            program.at_most([(1.0, new_then), (-1.0, new_at), (-1.0, arrival), *gone], 0.0)
            # What has arrived since the first update was made by then, somewhere.
            left = program.variable()
            known = [(-float(WEIGHT), each[slot]) for each in (here, there) if slot in each]
            program.equal([(1.0, left), (1.0, arrival), *made, *known], 0.0)
            made = [(-1.0, left)]
            old_at, new_at = old_then, new_then
            if slot + 1 < window.end:
                self._hold(slot + 1, old_at, new_at)

    def _gradient(self, window: _Window, size: float, here: Mapping[int, int], there: Mapping[int, int]) -> None:
        """Bytes of it on the device and on the host; whole on the device when the last one is added."""
        program = self.program
        device: list[Term] = []
        host: list[Term] = []
        for slot in range(window.made, window.end):
            back = self._copy(self.backs, slot)
            whole = slot in (window.made, window.final)
            if whole and device:
                load = self._copy(self.loads, slot)
                program.equal([*device, (1.0, load)], size)
                program.at_most([(1.0, load), *((-factor, each) for factor, each in host)], 0.0)
            elif not whole:
                load = self._copy(self.loads, slot)
                device, host = [*device, (1.0, load)], [*host, (-1.0, load)]
            device_then, host_then = program.variable(most=size), program.variable(most=size)
            updated = [(float(GRADIENT), here[slot])] if slot in here else []
            taken = [(float(GRADIENT), there[slot])] if slot in there else []
            before = [] if whole else [(-factor, each) for factor, each in device]
            program.equal([(1.0, device_then), (1.0, back), *updated, *before], size if whole else 0.0)
            before = [] if whole else [(-factor, each) for factor, each in host]
            program.equal([(1.0, host_then), (-1.0, back), *taken, *before], 0.0)
            device, host = [(1.0, device_then)], [(1.0, host_then)]
            if slot + 1 < window.end:
                self._hold(slot + 1, device_then)
