"""LoRA steps and prompts on one to eight GPUs, in simulation.

    python -m benchmarks.simulated_devices --add -o benchmarks/results/simulated-devices.json

No device runs anything. A row takes a minute to many. The file is written after each, so that a run can be stopped at
any time and ``--add`` goes on with the rows that are missing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.common.shapes import PRESETS
from benchmarks.simulated_devices.cells import DEVICES, LENGTHS, MEMORY, SPEEDS, Cell, Kind, grid
from benchmarks.simulated_devices.results_file import COMMAND, ResultsFile
from benchmarks.simulated_devices.rows import OutOfTime, Row, Say, at_most, bound_again, row
from benchmarks.simulated_devices.tables import line, name
from disco_accel.errors import ConfigError, DiscoError

ROW_SECONDS = 1200.0
"""After which a row is given up."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def one_of(known: Sequence[str]) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            given = text.split(",")
            if unknown := [word for word in given if word not in known]:
                raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(known)}")
            return given

        return parse

    def choose(flag: str, known: Sequence[Any], what: str) -> None:
        words = [str(each) for each in known]
        made.add_argument(flag, type=one_of(words), help=f"{what}: some of {','.join(words)}")

    choose("--kinds", tuple(Kind), "only steps of these kinds")
    choose("--shapes", tuple(PRESETS), "only of these models")
    choose("--dtypes", ("float32", "bfloat16"), "only of weights in these")
    choose("--tokens", LENGTHS, "only rows of so many tokens")
    choose("--gpus", tuple(SPEEDS), "only on these")
    choose("--devices", DEVICES, "only on so many")
    choose("--parallel", ("layers", "batch", "tensor"), "only in these ways")
    kept = made.add_mutually_exclusive_group()
    kept.add_argument("--add", action="store_true", help="keep the rows that the output has, make those it has not")
    kept.add_argument(
        "--rebound",
        action="store_true",
        help="as --add, and of rows of another commit's planner the bound anew, or all if the graph has changed",
    )
    kept.add_argument("--renew", action="store_true", help="as --add, and all rows of another commit's planner anew")
    made.add_argument(
        "--plan-seconds", type=float, help="for the search of one plan (default: as much work as it is worth)"
    )
    made.add_argument(
        "--row-seconds", type=float, default=ROW_SECONDS, help="a row is given up after so many (%(default)g)"
    )
    made.add_argument("--stop-after", type=float, default=float("inf"), help="begin no row after so many seconds")
    made.add_argument("--list", action="store_true", help="only say which rows would be made")
    made.add_argument("-o", "--output", type=Path, help="everything as JSON")
    return made


def chosen(args: argparse.Namespace) -> list[Cell]:
    """The cells that the command line asks for, in the order of their worth."""
    asked = {
        "kind": args.kinds,
        "shape": args.shapes,
        "dtype": args.dtypes,
        "tokens": args.tokens,
        "gpu": args.gpus,
        "devices": args.devices,
        "parallel": args.parallel,
    }
    return [cell for cell in grid() if all(w is None or str(getattr(cell, key)) in w for key, w in asked.items())]


def _kept(there: dict[str, Any] | None, results: ResultsFile, args: argparse.Namespace) -> bool:
    """Whether the row that is ``there`` stays as it is."""
    if there is None:
        return False
    if there["unfinished"] is not None and args.row_seconds > there["unfinished"]:
        return False
    return not ((args.renew or args.rebound) and results.is_old(there, bound=args.rebound))


def _made(cell: Cell, there: dict[str, Any] | None, args: argparse.Namespace, say: Say) -> tuple[dict[str, Any], bool]:
    """The row of ``cell``, and whether its bound alone is new, the rest is ``there``."""
    made = Row(cell, MEMORY[cell.gpu], unfinished=args.row_seconds)
    with suppress(OutOfTime), at_most(args.row_seconds):
        if there is not None and args.rebound and there["graph"] is not None:
            again = bound_again(cell, there["graph"], say)
            if again is not None:
                return {**there, **again}, True
        made = row(cell, args.plan_seconds, say)
    return made.as_json(), False


def _fill(cells: Sequence[Cell], results: ResultsFile, args: argparse.Namespace) -> bool:
    """Put the rows of ``cells`` that are wanted into ``results``; say whether all could be made."""
    fine, start = True, time.monotonic()
    for number, cell in enumerate(cells, 1):
        if (began := time.monotonic()) - start > args.stop_after:
            break
        if _kept(results.row_of(cell), results, args):
            continue

        def say(text: str, number: int = number, cell: Cell = cell, began: float = began) -> None:
            spent = time.monotonic() - began
            print(f"[{number}/{len(cells)}] {name(cell)}: {text} ({spent:.0f} s)", file=sys.stderr, flush=True)

        try:
            made, bound_only = _made(cell, results.row_of(cell), args, say)
        except DiscoError as error:
            fine = False
            say(f"{type(error).__name__}: {error}")
            continue
        results.put(made, bound_only=bound_only)
        print(line(made), flush=True)
    return fine


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit 1 if a row could not be made for another reason than memory or time."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(words)
    cells = chosen(args)
    try:
        results = ResultsFile(args.output, words, keep=args.add or args.rebound or args.renew or args.list)
        if not args.list:
            return 0 if _fill(cells, results, args) else 1
    except ConfigError as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 2
    for cell in cells:
        if not _kept(results.row_of(cell), results, args):
            print(name(cell))
    return 0
