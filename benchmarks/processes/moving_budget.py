"""Two jobs in one memory budget that alternate phases: ``python -m benchmarks.processes.moving_budget``.

Each job is a process that trains a stack of layers; in one phase its steps go through all of them, in the next through
two. While one needs much the other needs little. ``shared``: each takes what a ledger grants; ``ideal``: each is given
by hand, at the beginning of each phase, the split that is best for it; ``halves``: half of the memory each, always.
Ways run in turn. Weights cross a throttled link, so that steps wait for memory and not for this machine's cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.any_plan import wait_for_plans
from benchmarks.common.provenance import provenance
from disco_accel import DiscoConfig, prepare, restore, set_memory_budget, stats
from disco_accel.sizes import format_size, parse_size
from disco_accel.step.budget.grant_source import use_grants
from disco_accel.step.run.session import find_state
from tests.support.file_ledger import FileLedger

WIDTH, DEPTH, SHALLOW = 256, 24, 2
"""Weights of 256 KiB, 6 MiB in all."""
LINK = "60MB/s"
TOTAL = "8MiB"
LITTLE = "1MiB"
"""What a job is given by hand while it goes through two layers; the other has the rest."""
WAYS = ("shared", "ideal", "halves")


class Stack(torch.nn.Module):
    """Frozen products between a trained scale; the first ``depth`` of them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))
        self.layers.requires_grad_(False)

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        """A loss."""
        for layer in self.layers[:depth]:
            x = torch.tanh(layer(x * self.scale))
        return x.square().mean()


def batch(seed: int) -> torch.Tensor:
    """32 rows."""
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(seed))


class Training:
    """One job's training: the model, its optimizer, the number of its next step."""

    def __init__(self, job: int, config: DiscoConfig | None) -> None:
        self.model: torch.nn.Module = Stack(job)
        if config is not None:
            prepare(self.model, config)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-3)
        self.number = 0

    def steps(self, count: int, depth: int) -> list[float]:
        """Seconds of each."""
        taken = []
        for _ in range(count):
            began = time.perf_counter()
            self.model(batch(self.number), depth).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            taken.append(time.perf_counter() - began)
            self.number += 1
        return taken

    def bits(self) -> str:
        """A hash of what was trained."""
        data = b"".join(p.detach().numpy().tobytes() for p in self.model.parameters() if p.requires_grad)
        return hashlib.sha256(data).hexdigest()


def work() -> None:
    """The process of one job: for each line of stdin, a command with its arguments, a line of JSON."""
    torch.set_num_threads(1)
    training: Training | None = None
    for line in sys.stdin:
        command, *given = line.split()
        answer: Any = None
        if command == "begin":
            job, way, ledger = int(given[0]), given[1], given[2]
            if training is not None:
                restore(training.model)
            use_grants(lambda path=ledger: FileLedger(Path(path)))  # type: ignore[misc]
            budget = "shared" if way == "shared" else given[3]
            keys = {"device": "cpu", "compute_threads": 1, "plan_cache": None, "quiet": True, "link_bandwidth": LINK}
            training = Training(job, None if way == "alone" else DiscoConfig(memory_budget=budget, **keys))
        else:
            assert training is not None
            if command == "steps":
                answer = training.steps(int(given[0]), int(given[1]))
            elif command == "budget":
                set_memory_budget(training.model, given[0])
            elif command == "settled":
                answer = wait_for_plans(training.model)
            elif command == "bits":
                answer = training.bits()
            elif command == "stats":
                answer = {k: v for k, v in stats(training.model).items() if k.startswith(("budget_", "last_move"))}
        print(json.dumps(answer), flush=True)


class Worker:
    """A job's process, told what to do."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.processes.moving_budget", "--worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, *words: object) -> None:
        """Begin a command."""
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        """Of the command that was begun. EOFError where the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"moving_budget: a job ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def together(workers: Sequence[Worker], *commands: Sequence[object]) -> list[Any]:
    """Answers of all, which work at the same time."""
    for worker, command in zip(workers, commands, strict=True):
        worker.tell(*command)
    return [worker.answer() for worker in workers]


def phases(workers: Sequence[Worker], way: str, count: int, steps: int) -> list[list[float]]:
    """Seconds of the steps of each job, in ``count`` phases of so many steps."""
    taken: list[list[float]] = [[], []]
    much = format_size(parse_size(TOTAL) - parse_size(LITTLE))
    for phase in range(count):
        deep = [phase % 2 == job for job in range(2)]
        if way == "ideal":
            together(workers, *(("budget", much if each else LITTLE) for each in deep))
        answers = together(workers, *(("steps", steps, DEPTH if each else SHALLOW) for each in deep))
        for job, answer in enumerate(answers):
            taken[job] += answer
    return taken


def measure(rounds: int, steps: int) -> dict[str, Any]:
    """Seconds of steps by way, in each round; bits of both jobs; how often memory moved, and how long that took."""
    workers = [Worker(), Worker()]
    found: dict[str, Any] = {"seconds": {way: [] for way in WAYS}, "bits": {}, "moves": [], "move_seconds": []}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number in range(rounds):
                for way in (*WAYS, "alone") if number == 0 else WAYS:
                    ledger = Path(folder) / f"{way}-{number}"
                    FileLedger.create(ledger, parse_size(TOTAL))
                    half = format_size(parse_size(TOTAL) // 2)
                    together(workers, *(("begin", job, way, ledger, half) for job in range(2)))
                    # Once through all phases, so that plans are there.
                    phases(workers, way, 4, 4)
                    if way != "alone":
                        together(workers, *[("settled",)] * 2)
                        phases(workers, way, 4, 4)
                        together(workers, *[("settled",)] * 2)
                    else:
                        phases(workers, way, 4, 4)
                    taken = phases(workers, way, 4, steps)
                    if way != "alone":
                        found["seconds"][way].append(sum(map(sum, taken)))
                    found["bits"].setdefault(way, together(workers, *[("bits",)] * 2))
                    if way == "shared":
                        for told in together(workers, *[("stats",)] * 2):
                            found["moves"].append(told["budget_moves"])
                            found["move_seconds"].append(told["last_move_seconds"])
        finally:
            for worker in workers:
                worker.close()
    return found


def shrinking(steps: int) -> list[float]:
    """Seconds from a smaller grant, at any time of a step, to the end of the memory that is above it."""
    taken: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger"
        FileLedger.create(ledger, parse_size(TOTAL))
        use_grants(lambda: FileLedger(ledger))
        config = DiscoConfig(
            memory_budget="shared", device="cpu", compute_threads=1, plan_cache=None, quiet=True, link_bandwidth=LINK
        )
        training, watch = Training(0, config), FileLedger(ledger)
        training.steps(3, DEPTH)
        wait_for_plans(training.model)
        worker = Shrinker(watch, parse_size(TOTAL), parse_size(TOTAL) // 3)
        for number in range(steps):
            training.steps(2, DEPTH)
            worker.begin(delay=0.004 * (number % 8))
            training.steps(2, DEPTH)
            taken.append(worker.end())
        restore(training.model)
        use_grants(None)
    return taken


class Shrinker:
    """Takes memory away and waits, in a thread."""

    def __init__(self, ledger: FileLedger, large: int, small: int) -> None:
        self._ledger, self._large, self._small = ledger, large, small
        self._seconds = 0.0

    def begin(self, delay: float) -> None:
        """In so many seconds."""
        self._thread = threading.Thread(target=self._run, args=(delay,))
        self._thread.start()

    def _run(self, delay: float) -> None:
        time.sleep(delay)
        began = time.perf_counter()
        self._ledger.set_total(self._small)
        while sum(self._ledger.held()) > self._small:
            time.sleep(0.0005)
        self._seconds = time.perf_counter() - began

    def end(self) -> float:
        """Seconds that it took; everything is granted again."""
        self._thread.join()
        self._ledger.set_total(self._large)
        return self._seconds


def beside_planning(steps: int) -> tuple[list[float], list[float]]:
    """Seconds of steps alone, and of steps while plans for other budgets are made; in turn."""
    alone: list[float] = []
    beside: list[float] = []
    config = DiscoConfig(
        memory_budget="3MiB", device="cpu", compute_threads=1, plan_cache=None, quiet=True, link_bandwidth=LINK
    )
    training = Training(0, config)
    training.steps(4, DEPTH)
    state = find_state(training.model)
    assert state is not None
    family = state.budgets.plan_sets.all()[0]
    for number in range(steps // 5):
        alone += training.steps(5, DEPTH)
        state.budgets.plan_sets.maker.ask(family, parse_size("3MiB") + 4096 * (number + 1))
        count = 0
        while not state.budgets.plan_sets.maker.idle and count < 50:
            beside += training.steps(1, DEPTH)
            count += 1
        wait_for_plans(training.model)
    restore(training.model)
    return alone, beside


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="each with all ways in turn")
    parser.add_argument("--steps", type=int, default=30, help="of a phase")
    parser.add_argument("-o", "--output", type=Path, help="a JSON file for the figures")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.worker:
        work()
        return 0
    if args.rounds < 1 or args.steps < 2:
        parser.error("give --rounds of 1 or more and --steps of 2 or more")
    torch.set_num_threads(1)
    head = provenance("python -m benchmarks.processes.moving_budget", words, "cpu")
    found = measure(args.rounds, args.steps)
    alone, beside = beside_planning(40)
    taken = sorted(shrinking(24))
    found |= {"shrink_seconds": taken, "alone": alone, "beside": beside}
    show(head, found)
    if args.output is not None:
        args.output.write_text(json.dumps(head | found, indent=1) + "\n")
    same = all(found["bits"][way] == found["bits"]["alone"] for way in WAYS)
    return 0 if same else 1


def show(head: dict[str, Any], found: dict[str, Any]) -> None:
    """Print the figures as tables."""
    print(f"{head['machine']}; torch {torch.__version__}; load {head['load']}\n")
    print("| way | sum of step times, s | of the ideal split | bits as alone |\n|---|---|---|---|")
    ideal = statistics.median(found["seconds"]["ideal"])
    for way in WAYS:
        each = found["seconds"][way]
        spread = f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"
        same = "yes" if found["bits"][way] == found["bits"]["alone"] else "NO"
        print(f"| {way} | {spread} | {statistics.median(each) / ideal:.2f} | {same} |")
    taken, alone, beside = found["shrink_seconds"], found["alone"], found["beside"]
    step = statistics.median(alone)
    print(f"\nmoves of each shared job: {found['moves']}, the last of each took {_ms(found['move_seconds'])}")
    print(f"from a smaller grant to less memory: {_ms(taken)}; a step takes {1e3 * step:.1f} ms")
    print(f"steps alone {_ms(alone)}, mean {1e3 * statistics.mean(alone):.1f} ms")
    print(f"beside planning {_ms(beside)}, mean {1e3 * statistics.mean(beside):.1f} ms")


def _ms(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    return f"{1e3 * statistics.median(ordered):.1f} ms ({1e3 * ordered[0]:.1f} to {1e3 * ordered[-1]:.1f})"


if __name__ == "__main__":
    raise SystemExit(main())
