"""``make demo``: LoRA under half the memory, with and without a plan, compared bit for bit.

    python -m benchmarks.demo [--full] [--budgets half,least,all] [--steps 3] [--rounds 2] [--strict]

Writes a checkpoint, trains the recipe of ``configs/lora_demo.yaml`` without a plan and, beside it, under half of its
memory, and compares the two as soon as both have run. Then it times single steps in turn, prints one table and leaves
plan, trace and picture in ``out/demo``. ``--full``, which is ``make demo-full``, takes 30 steps, three budgets and 5
rounds. Exit code 1 if a loss, a weight or a limit does not hold; with ``--strict`` also if a timed figure is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.common.compare import compare_runs, read_metrics
from benchmarks.demo.report import BudgetRun, Check, first_comparison, limits, print_report
from benchmarks.demo.running import announce, beside, run
from disco_accel.config.settings import DiscoConfig
from disco_accel.graph.files import write_atomically
from tests.support import malloc_watch

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "configs/lora_demo.yaml"
CONFIG = "configs/disco.yaml"
OUT = Path("out/demo")
BUDGETS = ("half", "least", "all")
PICTURES = tuple(OUT / name for name in ("plan.json", "trace.json", "step.png"))


def start(command: list[str], log: Path, extra: dict[str, str] | None = None) -> float:
    """Run a command in the repository; returns seconds."""
    return run(command, log, _environment() | (extra or {}), ROOT)


def _environment() -> dict[str, str]:
    """Plans are made anew each time, so that the time they take is seen."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # transformers warns about its own calls from inside PEFT; nobody here can act on that.
    return {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore::FutureWarning", "DISCO_PLAN_CACHE": "null"}


def measure(module: str, log: Path, *arguments: str) -> dict[str, Any]:
    """Run a measuring module with its large allocations counted; return the JSON object that it prints last."""
    start([sys.executable, "-m", module, *arguments], log, {"LD_PRELOAD": str(malloc_watch.library())})
    result: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
    return result


def training_plain(output: Path, steps: int) -> AbstractContextManager[None]:
    """Train the recipe without a plan, beside the block."""
    command = [sys.executable, "recipes/lora.py", RECIPE, *_changes(output, steps)]
    return beside(command, output.with_suffix(".log"), _environment(), ROOT)


def train_planned(output: Path, steps: int, budget: int | None) -> float:
    """Train the recipe through the literal command of the README; ``budget`` replaces that of the config."""
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    command = [accelerate, "launch", "--config", CONFIG, "recipes/lora.py", RECIPE, *_changes(output, steps)]
    return start(command, output.with_suffix(".log"), {} if budget is None else {"DISCO_MEMORY_BUDGET": str(budget)})


def _changes(output: Path, steps: int) -> list[str]:
    shutil.rmtree(output, ignore_errors=True)
    return ["--output_dir", str(output), "--max_steps", str(steps)]


def train_budget(name: str, budget: int, steps: int) -> float:
    """Train under one budget; returns seconds."""
    announce(f"training under a budget of {budget / (1 << 20):.1f} MiB ({name}), {steps} steps")
    return train_planned(OUT / f"lora-{name}", steps, None if name == "half" else budget)


def compared(name: str, budget: int, plain: Path, seconds: float) -> BudgetRun:
    """Compare a run under a budget with the run in ``plain`` and say what came of it."""
    output = OUT / f"lora-{name}"
    found = BudgetRun(name, budget, read_metrics(output), compare_runs(plain, output), seconds)
    print(first_comparison(found), flush=True)
    return found


def time_steps(budget_run: BudgetRun, peak: int, rounds: int) -> None:
    """Time single steps in turn; those of the half budget are drawn too."""
    half = budget_run.name == "half"
    rounds = rounds if half else min(rounds, 2)
    announce(f"timing steps in turn ({budget_run.name}), {rounds} rounds")
    arguments = [RECIPE, "--config", CONFIG, "--budget", str(budget_run.budget), "--rounds", str(rounds)]
    if half:
        arguments += ["-o", str(OUT), "--in-memory-peak", str(peak)]
    budget_run.steps = measure("benchmarks.demo.interleaved", OUT / f"steps-{budget_run.name}.log", *arguments)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns 0 if everything holds."""
    args = _options(argv)
    os.chdir(ROOT)
    OUT.mkdir(parents=True, exist_ok=True)
    half = DiscoConfig.from_yaml(CONFIG).resolve().memory_budget
    for stale in PICTURES:
        stale.unlink(missing_ok=True)
    began = time.perf_counter()

    announce("writing a checkpoint of 77 M parameters")
    start([sys.executable, "-m", "benchmarks.demo.make_checkpoint", str(OUT / "checkpoint")], OUT / "checkpoint.log")
    plain, runs = OUT / "lora-plain", []
    announce(f"training without a plan, {args.steps} steps" + (", and beside it" if "half" in args.budgets else ""))
    with training_plain(plain, args.steps):
        seconds = train_budget("half", half, args.steps) if "half" in args.budgets else 0.0
    # Half first: it needs no figure of the others, so its comparison is there soonest.
    runs += [compared("half", half, plain, seconds)] if "half" in args.budgets else []
    announce("measuring the memory of a step without a plan, and the least budget")
    memory = measure("benchmarks.demo.probe", OUT / "probe.log", RECIPE, "--config", CONFIG)
    budgets = {"least": memory["least_budget"], "all": memory["all_budget"]}
    for name in args.budgets:
        if name != "half":
            runs.append(compared(name, budgets[name], plain, train_budget(name, budgets[name], args.steps)))
    for budget_run in runs:
        time_steps(budget_run, memory["in_memory_peak"], args.rounds)

    checks: list[Check] = [check for r in runs for check in limits(r, memory, args.steps)]
    if "half" in args.budgets:
        checks += [Check(f"{path} is written", path.is_file(), timed=False) for path in PICTURES]
    print_report(runs, memory, checks)
    print(f"\nall of it took {time.perf_counter() - began:.0f} s; files are in {OUT}/, the picture is {PICTURES[-1]}")
    summary = {"memory": memory, "checks": [c.as_dict() for c in checks], "steps": {r.name: r.steps for r in runs}}
    write_atomically(OUT / "summary.json", json.dumps(summary, indent=1).encode())
    return int(any(not c.holds for c in checks if args.strict or not c.timed))


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="LoRA under half the memory, compared with plain training bit for bit")
    parser.add_argument("--full", action="store_true", help="30 steps, all budgets, 5 rounds: seven minutes or more")
    parser.add_argument("--budgets", help=f"which budgets to train under: {', '.join(BUDGETS)} (default: half)")
    parser.add_argument("--steps", type=int, help="steps of each training (default: 3)")
    parser.add_argument("--rounds", type=int, help="single steps that are timed in turn (default: 2)")
    parser.add_argument("--strict", action="store_true", help="a missed timed figure fails too")
    args = parser.parse_args(argv)
    args.steps = args.steps or (30 if args.full else 3)
    args.rounds = args.rounds or (5 if args.full else 2)
    named = args.budgets.split(",") if args.budgets else (BUDGETS if args.full else ("half",))
    args.budgets = [name.strip() for name in named]
    unknown = [name for name in args.budgets if name not in BUDGETS]
    if unknown:
        parser.error(f"--budgets: {unknown[0]!r} is not one of {', '.join(BUDGETS)}")
    if args.steps < 2:
        parser.error("--steps: give at least 2; the first step of a training is not like the others")
    return args


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        print(f"stopped; what was written so far is in {OUT}/", file=sys.stderr)
        raise SystemExit(130) from None
