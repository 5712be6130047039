"""What processes that train on one base hold and wait for, with ``share_weights`` and without it:
``python -m benchmarks.processes.shared_weights``.

Four processes with equal random weights are prepared one after the other, run steps in turn and are weighed while all
of them live: by the proportional set size of Linux, in which a page that several processes map counts once in all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.provenance import provenance
from disco_accel import DiscoConfig, prepare
from disco_accel.native.extension import load_extension

PROCESSES, STEPS = 4, 5
WIDTH, ROWS = 2048, 64
_MIB = 1 << 20


class Base(torch.nn.Module):
    """``layers`` frozen matrices of 16 MiB, and one trained scale."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        self.layers.requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows``: any number of rows of ``WIDTH``. The loss."""
        for layer in self.layers:
            rows = torch.tanh(layer(rows) * self.scale)
        return rows.square().mean()


def work(layers: int, share: bool) -> None:
    """A process: does what each line of stdin says, and answers with a line of JSON."""
    torch.set_num_threads(1)
    model: Any = Base(layers)
    batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    config = DiscoConfig(
        memory_budget=256 * _MIB, device="cpu", compute_threads=1, plan_cache=None, quiet=True, share_weights=share
    )
    load_extension()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        answer: Any = None
        if line == "prepare\n":
            prepare(model, config)
            answer = time.perf_counter() - began
        elif line == "step\n":
            model.zero_grad()
            model(batch).backward()
            answer = time.perf_counter() - began
        elif line == "weigh\n":
            answer = _proportional_bytes()
        elif line == "bits\n":
            loss = model(batch)
            loss.backward()
            answer = [loss.item().hex(), float(model.scale.grad.double().sum()).hex()]
        print(json.dumps(answer), flush=True)


def _proportional_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


class Worker:
    """One of the processes."""

    def __init__(self, layers: int, share: bool, folder: str) -> None:
        words = [
            sys.executable,
            "-m",
            "benchmarks.processes.shared_weights",
            "--worker",
            str(layers),
            *["--share"] * share,
        ]
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder}
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._answer()

    def ask(self, what: str) -> Any:
        """What the process answers. EOFError where it has ended."""
        assert self._process.stdin is not None
        print(what, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"shared_weights: a process ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self._process.communicate()


@dataclass
class Seen:
    """Of all rounds in one mode: seconds of ``prepare`` by turn, of steps, and the sum of bytes; ``bits`` of a step."""

    prepare: list[list[float]] = field(default_factory=lambda: [[] for _ in range(PROCESSES)])
    steps: list[float] = field(default_factory=list)
    nbytes: list[float] = field(default_factory=list)
    bits: set[str] = field(default_factory=set)


def one_round(layers: int, share: bool, seen: Seen) -> None:
    """All processes from start to end, once."""
    with tempfile.TemporaryDirectory() as folder:
        workers: list[Worker] = []
        try:
            for _ in range(PROCESSES):
                workers.append(Worker(layers, share, folder))
            for turn, worker in enumerate(workers):
                seen.prepare[turn].append(worker.ask("prepare"))
            for worker in workers:
                seen.bits.add(json.dumps(worker.ask("bits")))
                worker.ask("step")
            for _ in range(STEPS):
                seen.steps += [worker.ask("step") for worker in workers]
            seen.nbytes.append(sum(worker.ask("weigh") for worker in workers))
        finally:
            for worker in workers:
                worker.close()


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The median, and half of the range."""
    half = (max(values) - min(values)) / 2
    return f"{statistics.median(values):.{digits}g} ±{half:.1g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=64, help="matrices of 16 MiB")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--share", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.worker is not None:
        work(args.worker, args.share)
        return 0
    if args.rounds < 1 or args.layers < 1:
        parser.error("--rounds, --layers: give 1 or more")
    head = provenance("python -m benchmarks.processes.shared_weights", words, "cpu")
    modes = {False: Seen(), True: Seen()}
    for _ in range(args.rounds):
        for share, seen in modes.items():
            one_round(args.layers, share, seen)
    own, shared = modes[False], modes[True]
    copy = args.layers * WIDTH * WIDTH * 4
    beside = statistics.median(own.nbytes) - PROCESSES * copy
    total = statistics.median(shared.nbytes)
    first, later = shared.prepare[0], [taken for turn in shared.prepare[1:] for taken in turn]
    print(f"# {head['command']}, {head['date']}\n# {head['machine']}; torch {torch.__version__}; load {head['load']}")
    print(f"# {PROCESSES} processes, a base of {copy >> 20} MiB; medians of {args.rounds} rounds, half of the range\n")
    print("| | weights of its own | shared |\n|---|---|---|")
    print(f"| all processes, GiB | {_gib(own.nbytes)} | {_gib(shared.nbytes)} |")
    print(f"| `prepare`, first process, s | {spread(own.prepare[0])} | {spread(first)} |")
    print(f"| `prepare`, others, s | {spread([t for turn in own.prepare[1:] for t in turn])} | {spread(later)} |")
    print(f"| a step, ms | {spread([1e3 * t for t in own.steps])} | {spread([1e3 * t for t in shared.steps])} |")
    ratio = statistics.median(later) / statistics.median(first)
    print(
        f"\nPages beside the base: {beside / 2**30:.3g} GiB of all. Of the base: {(total - beside) / copy:.3f} copies."
    )
    print(f"The others' `prepare` is {ratio:.3f} of the first one's.")
    print(f"Bits of loss and gradient: {'equal' if len(own.bits | shared.bits) == 1 else 'DIFFERENT'}.")
    return 0


def _gib(values: Sequence[float]) -> str:
    return spread([value / 2**30 for value in values])


if __name__ == "__main__":
    raise SystemExit(main())
