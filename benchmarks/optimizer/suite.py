"""Rows of ``disco-accel bench optimizer``: the study as measured, its schedule simulated, and ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.optimizer.least import Least, least_seconds
from benchmarks.optimizer.ours import Planned, Schedule, planned
from benchmarks.optimizer.study import GRADIENT, WEIGHT, Study
from benchmarks.optimizer.study_schedule import simulated_phases
from disco_accel.graph.copies import is_transfer, swaps_in, swaps_out
from disco_accel.plan.bound.lower_bound import bound_of
from disco_accel.plan.summary import peak_bytes, swapped_bytes

SHARED = 0.45
"""Share of the link's rate that is left when the processors use host memory as well: the study's measurement."""


@dataclass(frozen=True, slots=True)
class Row:
    """``seconds`` of a step among others; ``faster``: times the study's measured step; ``bound``: seconds that no plan
    of this graph beats, nor one with other places and times where those were asked for; ``on_device``: share of the
    parameters that the GPU updates. ``rate``: the link's, bytes/s; ``measured``: by the study, all else is
    simulated."""

    name: str
    seconds: float
    faster: float
    teraflops: float
    rate: float
    bound: float | None = None
    on_device: float | None = None
    to_device: int | None = None
    from_device: int | None = None
    peak: int | None = None
    measured: bool = False


def study_rows(study: Study) -> Iterator[Row]:
    """The study's step: measured, and its schedule simulated."""
    measured = study.measured
    yield Row("the study, measured", measured.step, 1.0, measured.teraflops, study.machine.pinned, measured=True)
    phases, _ = simulated_phases(study)
    parameters = study.model.parameters
    yield _row(
        study,
        "the study's schedule",
        phases.step,
        on_device=0.0,
        to_device=WEIGHT * parameters,
        from_device=GRADIENT * parameters,
    )


def our_row(study: Study, schedule: Schedule, least: Least | None = None) -> tuple[Row, Planned]:
    """Plan ``schedule`` and run it in simulated time. ``least``: with updates wherever and whenever."""
    if least is None and schedule.places == "timed":
        least = least_seconds(study, clip=schedule.clip)
    made = planned(study, schedule, least)
    bound = float(bound_of(made.graph, made.machine).bound)
    if least is not None:
        # Where places were chosen with times, their own graph's bound would hide a bad choice.
        bound = least.seconds if schedule.places == "timed" else max(bound, least.seconds)
    row = _row(
        study,
        name_of(schedule),
        made.period,
        bound=bound,
        on_device=made.share_on_device,
        to_device=swapped_bytes(made.plan, swaps_in),
        from_device=swapped_bytes(made.plan, swaps_out) + _transferred(made),
        peak=peak_bytes(made.plan),
    )
    return row, made


def _transferred(made: Planned) -> int:
    return sum(vertex.sizes[0] for vertex in made.plan.vertices if is_transfer(vertex))


def shared(study: Study) -> Study:
    """The same with a link as slow as beside processors that use host memory, all the time: a lower end."""
    return replace(study, machine=replace(study.machine, pinned=SHARED * study.machine.pinned))


def _row(study: Study, name: str, seconds: float, **rest: Any) -> Row:
    faster = study.measured.step / seconds
    return Row(name, seconds, faster, study.teraflops(seconds), study.machine.pinned, **rest)


def name_of(schedule: Schedule) -> str:
    """In words."""
    kind = "clipping" if schedule.clip else "no clipping"
    if schedule.places == "timed":
        return f"{kind}, place and time of each update chosen"
    when = "at the head of the next step" if schedule.deferred else "at the end"
    where = {
        "host": "all on the processors",
        "device": "all on the GPU",
        "half": "every other one on the GPU",
        "chosen": "places chosen",
    }
    return f"{kind}, updates {when}, {where[schedule.places]}"


HEADER = (
    "| step | s | x of the study | TFLOPS | step / lower bound | updated on the GPU | to the device | from the device "
    "| device memory | link, GB/s |\n|" + "---|" * 10
)


def line(row: Mapping[str, Any]) -> str:
    """One row as Markdown."""

    def optional(key: str, text: str, unit: float = 1.0) -> str:
        return "—" if row[key] is None else text.format(row[key] / unit)

    cells = [
        row["name"],
        f"{row['seconds']:.2f}",
        f"{row['faster']:.2f}",
        f"{row['teraflops']:.1f}",
        "—" if row["bound"] is None else f"{row['seconds'] / row['bound']:.2f}",
        optional("on_device", "{:.0%}"),
        optional("to_device", "{:.1f} GB", 1e9),
        optional("from_device", "{:.1f} GB", 1e9),
        optional("peak", "{:.1f} GB", 1e9),
        f"{row['rate'] / 1e9:g}",
    ]
    return "| " + " | ".join(cells) + " |"


def table(result: Mapping[str, Any]) -> str:
    """All rows of ``result`` as Markdown."""
    rows: Sequence[Mapping[str, Any]] = result["rows"]
    return "\n".join([HEADER, *map(line, rows)])
