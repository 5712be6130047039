"""Place and time of each update of the study's step, from where the processors and the link have most to do.

The processors update a share of the pieces, the device the others; of these the state of some stays there, and that of
the others is streamed. With clipping all updates are at the head of the next step. Without, most are behind their
gradients, and some in the next step's head, where the processors and the link have had nothing to do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.optimizer.least import Least
from benchmarks.optimizer.step_graph import Piece, StepOptions, pieces_of
from benchmarks.optimizer.study import GRADIENT, STATE, WEIGHT, Study
from disco_accel.plan.update_places import spread


@dataclass(frozen=True, slots=True)
class Mix:
    """How many pieces are what. ``on_host``: updated by the processors; ``stays``: with states that stay on the device;
    of both kinds that are deferred without clipping ``late_on_host`` and ``late_on_device``."""

    on_host: int
    stays: int
    late_on_host: int = 0
    late_on_device: int = 0


_BACKLOG = 0.1
"""Seconds of updates that wait for the processors at most before the device gets a piece: with none they would wait for
each gradient's transfer."""

_STEPS = (("on_host", 2), ("stays", 2), ("late_on_device", 2), ("late_on_host", 2))
"""What is tried around a mix."""


def first_mix(study: Study, per_layer: int, least: Least, *, clip: bool) -> Mix:
    """A guess: what the processors do in the least seconds, and the states that fit beside weights and gradients."""
    model, measured, count = study.model, study.measured, len(pieces_of(study, per_layer))
    room = study.machine.memory - (WEIGHT + GRADIENT) * model.parameters
    fitting = max(0, int(room / (STATE * model.parameters / count)))
    on_host = round(least.on_host * count)
    if clip:
        return Mix(on_host, min(fitting // 2, count - on_host))
    # What the processors cannot do from the first gradient on.
    before = model.accumulation * (measured.forward + measured.backward) - measured.backward
    early = count * (least.seconds - before) / study.machine.host_seconds(model.parameters)
    late = max(0, round(on_host - early))
    late_on_device = min(round(0.6 * late), count - on_host)
    return Mix(on_host, min(fitting * 3 // 4, count - on_host - late_on_device), late, late_on_device)


def neighbours(mix: Mix, count: int, *, clip: bool) -> Iterator[Mix]:
    """Mixes of ``count`` pieces that differ in one number."""
    for name, step in _STEPS[: 2 if clip else 4]:
        for change in (step, -step):
            near = replace(mix, **{name: getattr(mix, name) + change})
            if min(near.stays, near.late_on_host, near.late_on_device) >= 0 and _makes_sense(near, count):
                yield near


def _makes_sense(mix: Mix, count: int) -> bool:
    return 0 <= mix.late_on_host <= mix.on_host and mix.on_host + mix.stays + mix.late_on_device <= count


def options_of(study: Study, per_layer: int, mix: Mix, *, clip: bool) -> StepOptions:
    """Which pieces these are: each kind spread evenly over the layers in which it may be."""
    pieces = pieces_of(study, per_layer)
    ends = {0, len(pieces) - 1}
    if clip:
        on_host = _some([piece.number for piece in pieces], mix.on_host)
        left = [piece.number for piece in pieces if piece.number not in on_host | ends]
        deferred = frozenset(range(len(pieces)))
        return StepOptions(per_layer, clip, deferred, on_host, _some(left, mix.stays))
    early = _as_they_come(study, pieces, mix.on_host - mix.late_on_host)
    left = [piece.number for piece in pieces if piece.number not in early]
    # The forward needs the first layers too soon.
    upper = [number for number in left if number >= len(pieces) // 6]
    late_on_host = _some(upper, mix.late_on_host)
    upper = [number for number in upper if number not in late_on_host | ends]
    late_on_device = _some(upper[len(upper) // 2 :], mix.late_on_device)
    deferred = late_on_host | late_on_device
    stays = _some([number for number in left if number not in deferred | ends], mix.stays)
    return StepOptions(per_layer, clip, deferred, early | late_on_host, stays)


def _some(numbers: Sequence[int], count: int) -> frozenset[int]:
    return frozenset(spread(numbers, min(count, len(numbers))))


def _as_they_come(study: Study, pieces: Collection[Piece], count: int) -> frozenset[int]:
    """At most ``count`` pieces whose gradients come when the processors are about to have nothing to do; more of them
    wait, the later it is, where the processors have more to do than the backward takes."""
    backward = study.measured.backward
    rate = backward / study.model.parameters
    needed = study.machine.host_seconds(study.model.parameters * count // len(pieces))
    waiting = max(0.0, needed - backward - _BACKLOG) / backward
    taken: set[int] = set()
    clock = busy_until = 0.0
    for piece in _by_gradient(pieces):
        clock += piece.parameters * rate
        if piece.number and len(taken) < count and busy_until - clock < _BACKLOG + waiting * clock:
            arrives = clock + GRADIENT * piece.parameters / study.machine.pinned
            busy_until = max(busy_until, arrives) + study.machine.host_seconds(piece.parameters)
            taken.add(piece.number)
    return frozenset(taken)


def _by_gradient(pieces: Iterable[Piece]) -> list[Piece]:
    return sorted(pieces, key=lambda piece: (-piece.layer, piece.number))
