"""A LoRA step larger than the device, ours beside the others': ``disco-accel bench step``.

    disco-accel bench step --shape small --budgets 0.5 [--engines disco,in-memory,zero3] [-o out/step.json]
    disco-accel bench step --shape 7b --batch 8 --tokens 1024 --dtype bfloat16 --memory 8GiB,16GiB --apart
    disco-accel bench step --quant nf4,none --dtype bfloat16 --engines in-memory,resident,disco

Every engine has a process of its own and the same random weights, adapter, batch and optimizer. A step is forward,
backward and the adapter's AdamW. The engines take turns, every round starting with another one; with ``--apart`` each
runs alone, for models of which the host has no room for several. Losses of all steps and the gradients of the first are
compared with those of eager in memory, with weights of the same form. An engine that cannot run has its own error in
its row. docs/benchmarks.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import quantised
from benchmarks.common.provenance import provenance
from benchmarks.common.shapes import PRESETS, Shape
from benchmarks.step.engines import ENGINES, Job, Planned, Resident
from benchmarks.step.options import add_run, count, names_of, save
from benchmarks.step.peers import PEERS
from benchmarks.step.process import Worker
from benchmarks.step.table import judge, rows_of, table
from disco_accel.errors import ConfigError
from disco_accel.sizes import format_size, parse_size

WARM = 2
"""Steps before the timed ones: the first captures, plans, compiles."""
ALL = {**ENGINES, **PEERS}
_OVERRIDES = {
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocabulary": "vocab_size",
}


def measure(
    jobs: Sequence[Job],
    rounds: int,
    *,
    apart: bool,
    limit: float,
    seconds: float = math.inf,
    command: tuple[str, ...] | None = None,
    warm: int = WARM,
) -> list[Worker]:
    """Run every job's steps; each worker holds its losses, seconds, figures, or its error.

    ``limit``: seconds that any one answer may take, the building of a model included; ``seconds``: all together;
    ``command``: what each process runs, if it is not ``step_worker``; ``warm``: steps before the timed ones.
    """
    workers = [Worker(job, limit, time.monotonic() + seconds, command) for job in jobs]
    groups = [[worker] for worker in workers] if apart else [workers]
    try:
        for group in groups:
            for worker in group:
                worker.start()
            for worker in group:
                worker.built()
            for worker in group:
                worker.steps(warm, timed=False)
                worker.ask("mark")
            for number in range(rounds):
                turn = number % len(group)
                for worker in group[turn:] + group[:turn]:
                    worker.steps(1, timed=True)
            for worker in group:
                worker.finish()
    finally:
        for worker in workers:
            worker.stop()
    return workers


def jobs_of(args: argparse.Namespace, folder: Path) -> list[Job]:
    """A job for each form of the weights, each engine, and each budget of those that have one."""
    shape = shape_of(args)
    weights = quantised.weight_bytes(shape, args.quant[0], getattr(torch, args.dtype))
    budgets = [parse_size(text) for text in args.memory] or [int(share * weights) for share in args.budgets]
    jobs = []
    for quant, name in itertools.product(args.quant, args.engines):
        kind = ALL[name]
        has_budget = issubclass(kind, Planned) and not issubclass(kind, Resident)
        for budget in budgets if has_budget else [None]:
            place = folder / f"{quant}-{name}-{budget}"
            place.mkdir()
            jobs.append(
                Job(
                    engine=name,
                    shape=dict(shape),
                    batch=args.batch,
                    tokens=args.tokens,
                    dtype=args.dtype,
                    rank=args.rank,
                    checkpointing=not args.no_checkpointing,
                    device=args.device,
                    budget=budget,
                    bandwidth=args.bandwidth if args.device == "cpu" else None,
                    planner=args.planner,
                    folder=str(place),
                    quant=quant,
                )
            )
    return jobs


def shape_of(args: argparse.Namespace) -> Shape:
    """The preset with what ``--hidden`` and the like change of it. Raises ConfigError for a shape that cannot be."""
    given = {key: getattr(args, name) for name, key in _OVERRIDES.items() if getattr(args, name) is not None}
    shape = {**PRESETS[args.shape], **given}
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    if shape["hidden_size"] % (2 * heads) or heads % kv_heads:
        raise ConfigError(
            f"--hidden {shape['hidden_size']} --heads {heads} --kv-heads {kv_heads}: hidden must be a multiple "
            "of twice the heads, heads a multiple of kv-heads"
        )
    return shape


def run(words: Sequence[str]) -> dict[str, Any]:
    """What the command line ``words`` measures: all rows and where they come from, ready for JSON.

    Raises:
        ConfigError: the library of a form of the weights is not installed.
    """
    args = parser().parse_args(words)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    head = provenance("disco-accel bench step", words, args.device)
    head["versions"] |= quantised.versions(args.quant)
    with tempfile.TemporaryDirectory() as folder:
        workers = measure(
            jobs_of(args, Path(folder)), args.rounds, apart=args.apart, limit=args.limit, seconds=args.seconds
        )
        verdicts = judge(workers, args.dtype)
    shape = shape_of(args)
    return {
        "benchmark": "step",
        **head,
        "shape": {"name": args.shape, **shape},
        "batch": args.batch,
        "tokens": args.tokens,
        "dtype": args.dtype,
        "rank": args.rank,
        "checkpointing": not args.no_checkpointing,
        "device": args.device,
        "bandwidth": args.bandwidth if args.device == "cpu" else None,
        "weights": quantised.weight_bytes(shape, args.quant[0], getattr(torch, args.dtype)),
        "quant": args.quant,
        "interleaved": not args.apart,
        "rows": [asdict(row) for row in rows_of(workers, verdicts, args)],
    }


def _shares(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or any(not 0 < share < 1e3 for share in found):
        raise argparse.ArgumentTypeError(f"{text!r}: give shares of the weights above 0, such as 0.5,0.8")
    return found


def parser() -> argparse.ArgumentParser:
    """Options of the command line."""
    made = argparse.ArgumentParser(prog="disco-accel bench step", description=__doc__.split("\n")[0])
    add_shape(made, "small")
    for name, value in {"batch": 1, "tokens": 256, "rank": 16, "rounds": 5}.items():
        made.add_argument(f"--{name}", type=count, default=value)
    made.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    made.add_argument(
        "--quant",
        type=lambda t: names_of(quantised.NAMES, t),
        default=[quantised.PLAIN],
        help=f"forms of the frozen weights, every engine with each: {', '.join(quantised.NAMES)}",
    )
    made.add_argument("--budgets", type=_shares, default=[0.5], help="of the weights' bytes, in the first form")
    made.add_argument("--memory", type=lambda t: t.split(","), default=[], help="budgets as sizes, in their place")
    made.add_argument("--engines", type=lambda t: names_of(tuple(ALL), t), default=list(ALL), help=", ".join(ALL))
    made.add_argument("--no-checkpointing", action="store_true", help="of activations, by the script")
    made.add_argument("--apart", action="store_true", help="one engine after the other, never two in memory")
    add_run(made, "a step")
    return made


def add_shape(made: argparse.ArgumentParser, preset: str) -> None:
    """Options that ``shape_of`` reads; ``preset`` where none is given."""
    made.add_argument("--shape", choices=tuple(PRESETS), default=preset)
    for name in _OVERRIDES:
        made.add_argument(f"--{name.replace('_', '-')}", type=count, help="in place of the shape's")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Exit status 1 if one of our engines failed or gave other losses or gradients than eager."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(words)
    result = run(words)
    print(f"{result['machine']}; torch {torch.__version__}; load {result['load']}")
    saved = "no checkpointing" if args.no_checkpointing else "checkpointing"
    print(
        f"{args.shape}, batch {args.batch} x {args.tokens}, {args.dtype}, rank {args.rank}, weights "
        f"{format_size(result['weights'])} ({args.quant[0]}), {saved}; {'alone' if args.apart else 'in turn'}\n"
    )
    print(table(result))
    save(args.output, result)
    wrong = [row for row in result["rows"] if row["ours"] and not row["equal"]]
    for row in wrong:
        print(f"bench step: {row['engine']}: {row['error'] or row['verdict']}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
