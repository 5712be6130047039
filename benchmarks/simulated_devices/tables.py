"""The file of results as Markdown: steps beside what the papers measured, both tables, and what is not in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.simulated_devices.cells import SPEEDS, Cell, Kind, cell_of, grid
from disco_accel.sizes import format_size

Rows = Sequence[Mapping[str, Any]]

_COLUMNS = (
    "on | devices | parallel | parts | s per step | step / lower bound | limit | loaded | saved |\n|" + "---|" * 10
)
HEADERS = {Kind.LORA: f"| LoRA step | {_COLUMNS}", Kind.PROMPT: f"| prompt, bf16 | {_COLUMNS}"}
CLOSE = 1.05
"""Step over bound that is asked for where kernels or a link lead."""
_NAMED = 8
"""So many steps that take longer are named, of more the worst alone."""


@dataclass(frozen=True, slots=True)
class Published:
    """Seconds of a LoRA step of ``batch`` rows of 1024 tokens in float32 that the papers report of eight A100s with 40
    GB, measured there."""

    shape: str
    batch: int
    disco: float
    zero_infinity: float


PUBLISHED = (Published("7b", 8, 5.6, 12.5), Published("7b", 32, 12.1, 17.8), Published("65b", 8, 58.5, 72.9))
_WAYS = ("layers", "batch", "tensor")


def table(result: Mapping[str, Any]) -> str:
    """Everything below the title."""
    rows = result["rows"]
    parts = [
        "The papers' own seconds of a LoRA step in float32 on eight A100s with 40 GB, **measured** there, and ours, "
        "**simulated**. Settings and kernels are others: this is no race.",
        published(rows),
        *_both(rows),
        *notes(result),
    ]
    return "\n\n".join(parts)


def published(rows: Rows) -> str:
    """What the papers measured, and the same steps here."""
    lines = ["| LoRA step | DISCO, measured | ZeRO-Infinity, measured | layers | batch | tensor |", "|" + "---|" * 6]
    for known in PUBLISHED:
        cells = [f"{known.shape}, {known.batch} x 1024", f"{known.disco:g}", f"{known.zero_infinity:g}"]
        for way in _WAYS:
            wanted = (Kind.LORA, known.shape, "float32", known.batch, "a100", 8, way)
            keys = ("kind", "shape", "dtype", "batch", "gpu", "devices", "parallel")
            found = [row for row in _finished(rows) if tuple(row[key] for key in keys) == wanted]
            cells.append(_seconds(found[0]) if found else "not run")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _both(rows: Rows) -> Iterator[str]:
    for kind, header in HEADERS.items():
        own = [line(row) for row in _finished(rows) if row["kind"] == kind]
        if own:
            yield "\n".join([header, *own])


def line(row: Mapping[str, Any]) -> str:
    """One row as Markdown."""
    what = f"{row['shape']}, {row['tokens']} tokens"
    if row["kind"] == Kind.LORA:
        what = f"{row['shape']} {row['dtype']}, {row['batch']} x {row['tokens']}"
    cells = [what, SPEEDS[row["gpu"]].name, row["devices"], row["parallel"], row["parts"], _seconds(row)]
    if row["period"] is None:
        cells += ["—"] * 4
    else:
        cells += [f"{row['period'] / row['bound']:.2f}", row["limit"].replace("_", " ")]
        cells += [format_size(row["reload"]), format_size(row["offload"])]
    return "| " + " | ".join(map(str, cells)) + " |"


def _seconds(row: Mapping[str, Any]) -> str:
    if row["unfinished"] is not None:
        return f"not finished in {row['unfinished']:g} s"
    return f"needs {format_size(row['needed'])}" if row["period"] is None else f"{row['period']:.3f}"


def _finished(rows: Rows) -> Rows:
    return [row for row in rows if row["unfinished"] is None]


def notes(result: Mapping[str, Any]) -> Iterator[str]:
    """How near the rows are to their bounds, which planner made them, and which are not there."""
    rows = result["rows"]
    led = [row for row in rows if row["period"] is not None and row["limit"] in ("compute", "link")]
    if led:
        ratios = sorted(((row["period"] / row["bound"], _name(row)) for row in led), reverse=True)
        far = [f"{name} {ratio:.3f}" for ratio, name in ratios if ratio > CLOSE]
        near = f"{len(led) - len(far)} of the {len(led)} steps that kernels or a link limit"
        head = f"{near} take at most {CLOSE:g} of the bound"
        if not far:
            yield f"All {len(led)} steps that kernels or a link limit take at most {ratios[0][0]:.2f} of the bound."
        elif len(far) <= _NAMED:
            yield f"{head}, the others: {'; '.join(far)}."
        else:
            yield f"{head}, the others up to {ratios[0][0]:.2f} ({ratios[0][1]})."
    cut = [_name(row) for row in rows if row["cut"]]
    if cut:
        yield f"A deadline ended the search for these plans: {'; '.join(cut)}."
    runs = result["runs"]
    made = Counter((runs[row["run"]]["planner"], runs[row["run"]]["date"]) for row in rows)
    yield (
        "Rows by the commit of the planner: "
        + ", ".join(f"{count} of {planner} ({date})" for (planner, date), count in made.items())
        + _younger_bounds(result)
    )
    late = [f"{_name(row)} ({row['unfinished']:g} s)" for row in rows if row["unfinished"] is not None]
    if late:
        yield f"Not finished in the time that a row had: {'; '.join(late)}."
    missing = not_run([cell_of(dict(row)) for row in rows])
    if missing:
        yield f"Not run: {'; '.join(missing)}."


def _younger_bounds(result: Mapping[str, Any]) -> str:
    runs = result["runs"]
    younger = Counter(
        (runs[row["run"]]["planner"], runs[row["bound_run"]]["planner"]) for row in result["rows"] if "bound_run" in row
    )
    parts = [f"; {count} rows of {old} have bounds of {new}" for (old, new), count in younger.items()]
    return "".join(parts) + "."


def _name(row: Mapping[str, Any]) -> str:
    return name(cell_of(dict(row)))


def name(cell: Cell) -> str:
    """``cell`` in a sentence."""
    what = f"prompt of {cell.tokens}" if cell.kind is Kind.PROMPT else f"{cell.dtype}, {cell.batch} x {cell.tokens}"
    return f"{cell.shape} {what}, {cell.devices} {SPEEDS[cell.gpu].name}, {cell.parallel}"


def not_run(there: Sequence[Cell]) -> list[str]:
    """What the tables should have and ``there`` has not, whole groups by the name of the group."""
    missing = [cell for cell in sorted(grid(), key=lambda cell: cell.place) if cell not in set(there)]
    return list(_grouped(sorted(grid(), key=lambda cell: cell.place), missing, ()))


def _grouped(all_of: Sequence[Cell], missing: Sequence[Cell], above: tuple[str, ...]) -> Iterator[str]:
    if len(missing) == len(all_of):
        yield " ".join(above) or "all"
        return
    level = len(above)
    if level == len(_LEVELS):
        yield f"{' '.join(above)}: " + ", ".join(f"{cell.devices} by {cell.parallel}" for cell in missing)
        return
    for value in dict.fromkeys(_LEVELS[level](cell) for cell in missing):
        own, lost = ([c for c in cells if _LEVELS[level](c) == value] for cells in (all_of, missing))
        yield from _grouped(own, lost, (*above, value))


_LEVELS = (
    lambda cell: "LoRA" if cell.kind is Kind.LORA else "prompts",
    lambda cell: cell.shape,
    lambda cell: f"of {cell.tokens}" if cell.kind is Kind.PROMPT else f"{cell.dtype} {cell.batch} x {cell.tokens}",
    lambda cell: f"on {SPEEDS[cell.gpu].name}",
)
