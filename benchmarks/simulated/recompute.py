"""LoRA steps whose plans choose what is recomputed, beside plans that repeat what the script repeats, in simulation.

    python -m benchmarks.simulated.recompute [--shapes 8b] [-o FILE]

Every step is planned as ``disco-accel plan`` does it, with the speeds of ``CARD`` or ``H200``. No device runs anything.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.common.provenance import provenance
from benchmarks.common.speeds import speed_as_json
from benchmarks.simulated.lora import H200, Cell, rows
from benchmarks.simulated.quant import CARD, TITLES
from disco_accel.graph.files import write_atomically
from disco_accel.simulate.roofline import Speed
from disco_accel.sizes import format_size

SPEEDS: Mapping[str, Speed] = {"RTX 4090": CARD, "H200": H200}

_COMMAND = "python -m benchmarks.simulated.recompute"

_WRITTEN = "as-written"


def _both(cell: Cell, budgets: Sequence[str], ways: Sequence[tuple[bool, str]]) -> Iterator[Cell]:
    """``cell`` in each of the ``budgets``. ``ways``: whether the script has checkpoints, and the value of recompute."""
    for checkpointed, recompute in ways:
        for budget in budgets:
            yield replace(cell, budget=budget, checkpointed=checkpointed, recompute=recompute)


_ALL_WAYS = ((True, _WRITTEN), (True, "auto"), (False, _WRITTEN), (False, "auto"))

CELLS: Mapping[str, tuple[Cell, ...]] = {
    "RTX 4090": (
        *_both(Cell("8b", 1, 2048, 0.0), ("22GiB", "15GiB", "11GiB"), _ALL_WAYS),
        *_both(Cell("8b", 1, 2048, 0.0, "nf4"), ("22GiB", "11GiB", "7GiB"), _ALL_WAYS),
        *_both(Cell("32b", 1, 2048, 0.0, "nf4"), ("22GiB",), _ALL_WAYS[:2]),
        *_both(Cell("70b", 1, 2048, 0.0, "nf4"), ("22GiB",), _ALL_WAYS[:2]),
        *_both(Cell("8b", 1, 32768, 0.0, chunks="auto"), ("22GiB",), _ALL_WAYS),
    ),
    "H200": tuple(_both(Cell("7b", 8, 1024, 0.0), ("72GiB", "24GiB", "8GiB"), _ALL_WAYS)),
}
"""By device. The budgets are those of cards and of shares of large ones."""

HEADER = (
    "| LoRA step | on | checkpoints in the script | budget | as written | auto | recomputation dropped | auto / bound "
    "| offloaded | CPU s to plan, as written, auto |\n|" + "---|" * 10
)


def table(result: Mapping[str, Any]) -> str:
    """A line for each step and budget. Times are over those of the checkpointed step's kernels."""
    return "\n".join([HEADER, *_lines(result["rows"])])


def _lines(made: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    resident = {_step(row): row["resident"] for row in made if row["checkpointed"]}
    steps: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in made:
        steps.setdefault((_step(row), row["checkpointed"], row["budget"]), {})[row["recompute"]] = row
    for ways in steps.values():
        auto, written = ways["auto"], ways[_WRITTEN]
        unit = resident[_step(auto)]
        cells = [f"{auto['shape']} {TITLES[auto['quant']]}, {auto['batch']} x {auto['tokens']}", auto["device"]]
        cells += ["yes" if auto["checkpointed"] else "no", format_size(auto["budget"])]
        cells += [_seconds(written, unit), _seconds(auto, unit)]
        if auto["period"] is None:
            cells += ["—"] * 4
        else:
            dropped = "—" if auto["dropped"] is None else f"{auto['dropped']:.0%}"
            cells += [dropped, f"{auto['period'] / auto['bound']:.2f}", format_size(auto["offload"])]
            before = "—" if written["plan_seconds"] is None else f"{written['plan_seconds']:.1f}"
            cells += [f"{before}, {auto['plan_seconds']:.1f}"]
        yield "| " + " | ".join(cells) + " |"


def _step(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["device"], row["shape"], row["batch"], row["tokens"], row["quant"]


def _seconds(row: Mapping[str, Any], unit: float) -> str:
    return f"needs {format_size(row['needed'])}" if row["period"] is None else f"{row['period'] / unit:.3f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. A budget that is too small for its step is a cell that says what it needs."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulated.recompute", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--shapes", type=lambda t: t.split(","), help="only cells of these")
    parser.add_argument("-o", "--output", type=Path, help="everything as JSON")
    args = parser.parse_args(words)
    made = []
    for device, cells in CELLS.items():
        for row in rows([cell for cell in cells if args.shapes is None or cell.shape in args.shapes], SPEEDS[device]):
            made.append(asdict(row) | {"device": device})
            print(_progress(made[-1]), file=sys.stderr, flush=True)
    print(table({"rows": made}))
    if args.output is not None:
        write(args.output, made, words)
    return 0


def _progress(row: Mapping[str, Any]) -> str:
    step = f"{row['shape']} {TITLES[row['quant']]}, {row['batch']} x {row['tokens']}, {format_size(row['budget'])}"
    return f"{row['device']}, {step}, {row['recompute']}: {_seconds(row, row['resident'])}"


def write(path: Path, made: Sequence[Mapping[str, Any]], words: Sequence[str]) -> None:
    """Write ``made`` with its origin: simulated, no device."""
    device = "simulated: RTX 4090 behind 25 GB/s each way, H200 behind 55 GB/s each way"
    head = provenance(_COMMAND, words, device)
    speeds = {name: speed_as_json(speed) for name, speed in SPEEDS.items()}
    result = {"benchmark": "simulated-recompute", **head, "speeds": speeds, "rows": list(made)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(result, indent=1).encode())


if __name__ == "__main__":
    raise SystemExit(main())
