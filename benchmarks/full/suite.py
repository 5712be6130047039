"""A whole model trained with AdamW, its optimizer on the host, ours beside the others': ``disco-accel bench full``.

    disco-accel bench full [--shape 77m] [--share 0.33 | --memory 500MiB] [--bandwidth 2e9] [-o out/full.json]

Every engine has a process of its own and the same random weights, batch and AdamW; all weights are trained. The engines
take turns, every round starting with another one. Losses of all steps, the gradients of the first and the weights
after the last are compared with those of eager in memory. docs/benchmarks.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.provenance import provenance
from benchmarks.common.shapes import frozen_bytes
from benchmarks.full.engines import ENGINES, Planned, Resident
from benchmarks.full.table import judge_whole, rows_of_whole, table
from benchmarks.full.worker import COMMAND
from benchmarks.step.engines import Job
from benchmarks.step.options import add_run, count, names_of, save
from benchmarks.step.suite import add_shape, measure, shape_of
from disco_accel.errors import ConfigError
from disco_accel.sizes import format_size, parse_size

WARM = 4
"""Steps before the timed ones: the first makes the moments, the third is the first with a deferred update."""
SHOWN = tuple(name for name in ENGINES if name != "probe")


def job_of(args: argparse.Namespace, name: str, budget: int | None, folder: Path) -> Job:
    """What one engine's process runs, with a folder of its own in ``folder``."""
    place = folder / name
    place.mkdir()
    return Job(
        engine=name,
        shape=dict(shape_of(args)),
        batch=args.batch,
        tokens=args.tokens,
        dtype=args.dtype,
        rank=0,
        device="cpu",
        budget=budget,
        bandwidth=args.bandwidth,
        planner=args.planner,
        folder=str(place),
    )


def eager_peak(args: argparse.Namespace, folder: Path) -> int:
    """Bytes that eager training holds at most: weights, gradients, moments, activations. ConfigError if it fails."""
    (probe,) = measure([job_of(args, "probe", None, folder)], 0, apart=True, limit=args.limit, command=COMMAND)
    if probe.error is not None:
        raise ConfigError(f"bench full: a step in memory does not run: {probe.error}")
    return int(probe.facts["peak"])


def run(words: Sequence[str]) -> dict[str, Any]:
    """What the command line ``words`` measures: all rows and where they come from, ready for JSON."""
    args = parser().parse_args(words)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    head = provenance("disco-accel bench full", words, "cpu")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peak = eager_peak(args, folder)
        budget = int(args.share * peak) if args.memory is None else parse_size(args.memory)
        jobs = []
        for engine in args.engines:
            has_budget = issubclass(ENGINES[engine], Planned) and not issubclass(ENGINES[engine], Resident)
            jobs.append(job_of(args, engine, budget if has_budget else None, folder))
        workers = measure(
            jobs, args.rounds, apart=False, limit=args.limit, seconds=args.seconds, command=COMMAND, warm=WARM
        )
        verdicts = judge_whole(workers, args.dtype)
    return {
        "benchmark": "full",
        **head,
        "shape": {"name": args.shape, **shape_of(args)},
        "batch": args.batch,
        "tokens": args.tokens,
        "dtype": args.dtype,
        "device": "cpu",
        "bandwidth": args.bandwidth,
        "weights": frozen_bytes(shape_of(args), getattr(torch, args.dtype).itemsize),
        "eager_peak": peak,
        "budget": budget,
        "rows": [asdict(row) for row in rows_of_whole(workers, verdicts, args, WARM)],
    }


def _share(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e3:
        raise argparse.ArgumentTypeError(f"{text!r}: give a share above 0, such as 0.33")
    return found


def parser() -> argparse.ArgumentParser:
    """Options of the command line."""
    made = argparse.ArgumentParser(prog="disco-accel bench full", description=__doc__.split("\n")[0])
    add_shape(made, "77m")
    for name, value in {"batch": 1, "tokens": 128, "rounds": 7}.items():
        made.add_argument(f"--{name}", type=count, default=value)
    made.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    made.add_argument("--share", type=_share, default=1 / 3, help="budget, of what eager holds")
    made.add_argument("--memory", help="budget as a size, in its place")
    made.add_argument("--engines", type=lambda t: names_of(SHOWN, t), default=list(SHOWN), help=", ".join(SHOWN))
    add_run(made, "a step")
    made.set_defaults(bandwidth=2e9, device="cpu")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Exit status 1 if one of our engines failed or gave other losses, gradients or weights than eager;
    a budget that is too small for the optimizer's state is no failure."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(words)
    result = run(words)
    print(f"{result['machine']}; torch {torch.__version__}; load {result['load']}")
    print(
        f"{args.shape}, batch {args.batch} x {args.tokens}, {args.dtype}, weights {format_size(result['weights'])}; "
        f"eager holds {format_size(result['eager_peak'])}, budget {format_size(result['budget'])}; in turn\n"
    )
    print(table(result))
    save(args.output, result)
    wrong = [
        row
        for row in result["rows"]
        if row["ours"] and not row["equal"] and not (row["error"] or "").startswith("BudgetTooSmall")
    ]
    for row in wrong:
        print(f"bench full: {row['engine']}: {row['error'] or row['verdict']}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
