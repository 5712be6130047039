"""What two processes with nothing in common get out of this machine: ``python -m benchmarks.processes.two_processes``.

The step of ``bench devices`` with real kernels, on one device with one thread: the whole batch in one process, half of
it in one process, and halves in two processes at once. What the last is slower than the one before, two devices of one
process lose to the machine's memory and caches as well; no ``parallel: batch`` on two of them beats it by much.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from benchmarks.common.provenance import provenance
from benchmarks.devices.suite import REAL, ROWS
from disco_accel import DiscoConfig, prepare

STEPS = 5
"""In a row, in each turn."""


class Worker:
    """A process that runs steps when told to, a line each way."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.processes.two_processes", "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, rows: int) -> None:
        """Begins ``STEPS`` steps of so many rows."""
        assert self._process.stdin is not None
        print(rows, file=self._process.stdin, flush=True)

    def seconds(self) -> list[float]:
        """Of each step of those that were begun last. EOFError where the process has ended."""
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise EOFError(f"two_processes: a worker ended with {self._process.wait()}")
        return [float(word) for word in answer.split()]

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def work() -> None:
    """The worker: for each line of stdin with a number of rows, a line with the seconds of its steps."""
    torch.set_num_threads(1)
    config = DiscoConfig(memory_budget=REAL.budget, device="cpu", compute_threads=1, plan_cache=None, quiet=True)
    model = prepare(REAL.model(), config)
    for line in sys.stdin:
        batch = {name: value[: int(line)] for name, value in REAL.batch().items()}
        taken = []
        for _ in range(STEPS):
            began = time.perf_counter()
            model(**batch).loss.backward()
            model.zero_grad()
            taken.append(time.perf_counter() - began)
        print(*taken, flush=True)


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds of steps: the whole batch alone, half of it alone, halves side by side; in turn, after one round."""
    workers = [Worker(), Worker()]
    turns = {"whole": ([workers[0]], ROWS), "half": ([workers[0]], ROWS // 2), "halves": (workers, ROWS // 2)}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    try:
        for number in range(rounds + 1):
            for name, (running, rows) in turns.items():
                for worker in running:
                    worker.start(rows)
                taken = [worker.seconds() for worker in running]
                if number:
                    # Both halves of a step are needed, so the slower one counts.
                    seconds[name] += [max(each) for each in zip(*taken, strict=True)]
    finally:
        for worker in workers:
            worker.close()
    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.worker:
        work()
        return 0
    if args.rounds < 1:
        parser.error("--rounds: give 1 or more")
    head = provenance("python -m benchmarks.processes.two_processes", words, "cpu")
    median = {name: statistics.median(taken) for name, taken in measure(args.rounds).items()}
    print(f"{head['machine']}; torch {torch.__version__}; load {head['load']}\n")
    print("| step | s | as fast as the whole batch in one process |\n|---|---|---|")
    for name, title in (("whole", "the whole batch"), ("half", "half of it"), ("halves", "halves in two processes")):
        print(f"| {title} | {median[name]:.3g} | {median['whole'] / median[name]:.2f} x |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
