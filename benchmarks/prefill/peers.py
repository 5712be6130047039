"""A prompt read beside what others offer, each engine in a process of its own.

    python -m benchmarks.prefill.peers --shape 7b --tokens 1024 --dtype bfloat16 --memory 8GiB --device cuda [-o OUT]

``bench prefill`` takes its peers from here, and gives them their turns. The command above runs the engines one after
the other, on a GPU too (``make gpu-peers``), with a row for each. Logits, keys and values are compared with eager's in
memory; an engine that cannot run has its own error in its row.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.common.compare import same_bits
from benchmarks.common.provenance import provenance
from benchmarks.common.shapes import PRESETS, frozen_bytes
from benchmarks.common.subjects import Times
from benchmarks.prefill.engines import READERS, TITLES
from benchmarks.prefill.worker import COMMAND
from benchmarks.step.engines import Job
from benchmarks.step.options import add_run, count, names_of, save
from benchmarks.step.process import Worker
from benchmarks.step.suite import measure
from benchmarks.step.table import Verdict, cell_text, rate_cell, relative, size_cell
from disco_accel.sizes import format_size, parse_size

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Of logits, keys and values, relative. Ours must have eager's bits on the CPU."""


def verdict_of(worker: Worker, expected: Mapping[str, torch.Tensor]) -> Verdict:
    """Compare what the first prompt of ``worker`` left, and the logits' sum of the later ones, with eager's."""
    if worker.error is not None:
        return Verdict(False, "")
    found = load_file(Path(worker.job.folder) / "outputs.safetensors")
    if found.keys() != expected.keys() or any(found[name].shape != expected[name].shape for name in expected):
        return Verdict(False, "no: other layers, or other sizes")
    if len(set(worker.losses)) > 1 and worker.job.device == "cpu":
        return Verdict(False, "no: prompts differ from each other")
    if all(same_bits(found[name], expected[name]) for name in expected):
        return Verdict(True, "bits")
    apart = max(relative(found[name], expected[name]) for name in expected)
    exact = worker.job.device == "cpu" and worker.job.engine == "disco"
    equal = apart <= TOLERANCE[worker.job.dtype] and not exact
    return Verdict(equal, f"{'to' if equal else 'no:'} {apart:.0e}")


class Peers:
    """Processes that read the prompt of ``bench prefill`` when it is their turn, until the ``with`` block ends."""

    def __init__(self, names: Sequence[str], job: Callable[[str, str], Job], limit: float) -> None:
        """``job``: of an engine and a folder; ``limit``: seconds that an answer may take."""
        self.names = list(names)
        self._job, self._limit = job, limit
        self._workers: dict[str, Worker] = {}

    def __enter__(self) -> Peers:
        with contextlib.ExitStack() as stack:
            for name in self.names:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                worker = Worker(self._job(name, folder), self._limit, command=COMMAND)
                stack.callback(worker.stop)
                self._workers[name] = worker
                worker.start()
            for worker in self._workers.values():
                worker.built()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def turn(self, name: str) -> float:
        """Seconds of a prompt that ``name`` reads; not a number if it cannot."""
        worker = self._workers[name]
        worker.steps(1, timed=True)
        return worker.seconds[-1] if worker.error is None else math.nan

    def rows(self, expected: Mapping[str, torch.Tensor], rounds: int) -> dict[str, dict[str, Any]]:
        """Of each peer: its error or None, the seconds of the last ``rounds`` prompts, and how equal they were."""
        rows = {}
        for name, worker in self._workers.items():
            verdict = verdict_of(worker, expected)
            seconds = worker.seconds[-rounds:] if worker.error is None else []
            rows[name] = {"error": worker.error, "seconds": seconds, **asdict(verdict)}
        return rows


def peer_cell(row: Mapping[str, Any] | None, planned: float) -> str:
    """A peer's seconds over ``planned``, with what differs; its error if it could not run."""
    if row is None:
        return "—"
    if row["error"] is not None:
        return cell_text(row["error"])
    ratio = f"{Times(tuple(row['seconds'])).median / planned:.2f}"
    return ratio if row["words"] == "bits" else f"{ratio} ({row['words']})"


def run(words: Sequence[str]) -> dict[str, Any]:
    """What the command line ``words`` measures: all rows and where they come from, ready for JSON."""
    args = parser().parse_args(words)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    head = provenance("python -m benchmarks.prefill.peers", words, args.device)
    with tempfile.TemporaryDirectory() as folder:
        jobs = [_job_of(name, Path(folder), args) for name in args.engines]
        workers = measure(jobs, args.rounds, apart=True, limit=args.limit, seconds=args.seconds, command=COMMAND)
        rows = _rows(workers)
    return {
        "benchmark": "prefill-peers",
        **head,
        "shape": {"name": args.shape, **PRESETS[args.shape]},
        **{name: getattr(args, name) for name in ("batch", "tokens", "dtype", "device", "memory")},
        "bandwidth": args.bandwidth if args.device == "cpu" else None,
        "weights": frozen_bytes(PRESETS[args.shape], getattr(torch, args.dtype).itemsize),
        "rows": rows,
    }


def _job_of(name: str, folder: Path, args: argparse.Namespace) -> Job:
    (folder / name).mkdir()
    return Job(
        engine=name,
        shape=dict(PRESETS[args.shape]),
        batch=args.batch,
        tokens=args.tokens,
        dtype=args.dtype,
        rank=0,
        device=args.device,
        budget=parse_size(args.memory) if name == "disco" else None,
        bandwidth=args.bandwidth if args.device == "cpu" else None,
        planner=args.planner,
        folder=str(folder / name),
    )


def _rows(workers: Sequence[Worker]) -> list[dict[str, Any]]:
    eager = next((w for w in workers if w.job.engine == "in-memory" and w.error is None), None)
    expected = None if eager is None else load_file(Path(eager.job.folder) / "outputs.safetensors")
    rows = []
    for worker in workers:
        verdict = Verdict(True, "not compared: nothing ran in memory")
        if expected is not None or worker.error is not None:
            verdict = verdict_of(worker, expected or {})
        seconds = worker.seconds if worker.error is None else []
        facts = worker.facts if worker.error is None else {}
        known = {name: facts.get(name) for name in ("used", "reserved", "host", "h2d", "d2h", "any_plan")}
        rows.append(
            {"engine": worker.job.engine, "error": worker.error, "seconds": seconds, **known, **asdict(verdict)}
        )
    return rows


HEADER = (
    "| engine | s per prompt | device used | device reserved | process memory | to device, GB/s | lower bound / prompt "
    "| equal to eager |\n|" + "---|" * 8
)


def table(result: Mapping[str, Any]) -> str:
    """Markdown: a line for each row; an engine that could not run has its error in the last cell."""
    return "\n".join([HEADER, *map(_line, result["rows"])])


def _line(row: Mapping[str, Any]) -> str:
    title = TITLES[row["engine"]]
    if row["error"] is not None:
        return f"| {title} |" + " — |" * 6 + f" {cell_text(row['error'])} |"
    times = Times(tuple(row["seconds"]))
    cells = [
        title,
        f"{times.median:.3g} ±{times.spread:.1g}",
        *(size_cell(row[name]) for name in ("used", "reserved", "host")),
        rate_cell(row["h2d"], times.median),
        "—" if row["any_plan"] is None else f"{row['any_plan'] / times.median:.0%}",
        row["words"],
    ]
    return "| " + " | ".join(cells) + " |"


def parser() -> argparse.ArgumentParser:
    """Options of the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.prefill.peers", description=__doc__.split("\n")[0])
    made.add_argument("--shape", choices=tuple(PRESETS), default="small")
    for name, value in {"batch": 1, "tokens": 256, "rounds": 5}.items():
        made.add_argument(f"--{name}", type=count, default=value)
    made.add_argument("--dtype", choices=tuple(TOLERANCE), default="float32")
    made.add_argument("--memory", required=True, help="the budget as a size, such as 8GiB")
    made.add_argument("--engines", type=lambda t: names_of(tuple(READERS), t), default=list(READERS))
    add_run(made, "a prompt")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Exit status 1 if ours failed or left other logits, keys or values than eager."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(words)
    result = run(words)
    print(f"{result['machine']}; torch {torch.__version__}; load {result['load']}")
    print(
        f"prompt of {args.batch} x {args.tokens} tokens, {args.shape}, {args.dtype}, "
        f"{format_size(result['weights'])} of weights, budget {args.memory}\n"
    )
    print(table(result))
    save(args.output, result)
    wrong = [row for row in result["rows"] if row["engine"] == "disco" and not row["equal"]]
    for row in wrong:
        print(f"prefill_peers: disco: {row['error'] or row['words']}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
