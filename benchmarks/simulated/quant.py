"""LoRA steps of 8B to 70B shapes on cards of 12, 16 and 24 GB, frozen weights in 4 or 16 bits, in simulation.

    python -m benchmarks.simulated.quant [-o FILE]

No device runs anything, and no library that packs weights is needed: what ``disco-accel plan --quant`` plans, with the
speeds of a card of this class. Every plan is verified.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.common.provenance import provenance
from benchmarks.common.speeds import speed_as_json
from benchmarks.simulated.lora import Cell, rows
from disco_accel.graph.files import write_atomically
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.simulate.roofline import Speed
from disco_accel.simulate.simulator import Link, Machine
from disco_accel.sizes import format_size, parse_size

CARD = Speed(
    name="an RTX 4090 behind PCIe 4",
    half=9.9e13,
    single=4.9e13,
    memory=8.1e11,
    kernel=5e-6,
    machine=Machine(links={TO_DEVICE: Link(2.5e10, 1e-5), TO_HOST: Link(2.5e10, 1e-5)}),
)
"""Six tenths of the arithmetic peaks of an RTX 4090's data sheet (165 TFLOPS in 16 bits), eight tenths of its memory
bandwidth, 25 GB/s in each direction, 10 us a copy."""

BUDGETS = {"12 GB": "11GiB", "16 GB": "15GiB", "24 GB": "22GiB"}
"""Card to budget: the rest is for the driver, the libraries and the screen."""

FORMS = ("nf4", "none")
TITLES = {"nf4": "NF4", "none": "bf16"}

CELLS = tuple(
    Cell(shape, 1, 2048, budget, form)
    for shape in ("8b", "32b", "70b")
    for form in FORMS
    for budget in BUDGETS.values()
)

HEADER = (
    "| LoRA step | weights | all resident: peak, s, tokens/s | budget | s per step | step / all resident | tokens/s "
    "| step / lower bound | limit | loaded | host memory |\n|" + "---|" * 11
)

SHORT_HEADER = (
    "| LoRA step | host memory | all resident: device memory, tokens/s | "
    + " | ".join(f"{card} card, {budget}" for card, budget in BUDGETS.items())
    + " |\n|"
    + "---|" * (3 + len(BUDGETS))
)


def line(row: Mapping[str, Any]) -> str:
    """One row as Markdown."""
    tokens = row["batch"] * row["tokens"]
    cells = [
        _name(row),
        format_size(row["weights"]),
        f"{format_size(row['peak'])}, {row['resident']:.3f}, {tokens / row['resident']:.0f}",
        format_size(row["budget"]),
    ]
    if row["period"] is None:
        return "| " + " | ".join([*cells, f"needs {format_size(row['needed'])}", *["—"] * 6]) + " |"
    cells += [
        f"{row['period']:.3f}",
        f"{row['period'] / row['resident']:.3f}",
        f"{tokens / row['period']:.0f}",
        f"{row['period'] / row['bound']:.3f}",
        row["limit"].replace("_", " "),
        format_size(row["reload"]),
        format_size(row["host"]),
    ]
    return "| " + " | ".join(cells) + " |"


def short_table(result: Mapping[str, Any]) -> str:
    """A line for each step of ``result``, a column for each card."""
    return "\n".join([SHORT_HEADER, *_short_lines(result["rows"])])


def _short_lines(made: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for name, group in groupby(made, _name):
        found = {row["budget"]: row for row in group}
        one = next(iter(found.values()))
        host = max((row["host"] or 0 for row in found.values()), default=0)
        speed = one["batch"] * one["tokens"] / one["resident"]
        cells = [name, format_size(host) if host else "—", f"{format_size(one['peak'])}, {speed:.0f}"]
        for budget in BUDGETS.values():
            row = found.get(parse_size(budget))
            cells.append("—" if row is None else _short_cell(row))
        yield "| " + " | ".join(cells) + " |"


def _short_cell(row: Mapping[str, Any]) -> str:
    if row["period"] is None:
        return f"needs {format_size(row['needed'])}"
    return f"{row['period'] / row['resident']:.2f}, {format_size(row['reload'])}"


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['shape']} {TITLES[row['quant']]}, {row['batch']} x {row['tokens']}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. A budget that is too small for its step is a row that says what it needs."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulated.quant", description=__doc__.split("\n")[0])
    shapes = list(dict.fromkeys(cell.shape for cell in CELLS))
    parser.add_argument("--shapes", type=lambda t: t.split(","), default=shapes, help="only cells of these")
    parser.add_argument("-o", "--output", type=Path, help="everything as JSON")
    args = parser.parse_args(words)
    print(HEADER, flush=True)
    made = []
    for row in rows([cell for cell in CELLS if cell.shape in args.shapes], CARD):
        made.append(asdict(row))
        print(line(made[-1]), flush=True)
    if args.output is not None:
        write(args.output, made, words)
    return 0


def write(path: Path, made: Sequence[Mapping[str, Any]], words: Sequence[str]) -> None:
    """Write ``made`` with its origin: simulated, no device."""
    device = "simulated: RTX 4090 behind 25 GB/s each way"
    head = provenance("python -m benchmarks.simulated.quant", words, device)
    result = {"benchmark": "simulated-quant", **head, "speed": speed_as_json(CARD), "rows": list(made)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(result, indent=1).encode())


if __name__ == "__main__":
    raise SystemExit(main())
