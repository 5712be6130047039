"""``make demo``: LoRA under half the memory, with and without a plan, compared bit for bit.

    python -m benchmarks.demo [--budgets least,half,all] [--steps 30] [--strict]

Writes a checkpoint, trains the recipe of ``configs/lora_demo.yaml`` without a plan and under each budget, times single
steps in turn, prints one table and leaves plan, trace and picture in ``out/demo``. Exit code 1 if a loss, a weight or a
limit does not hold; with ``--strict`` also if a timed figure is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.compare import Sameness, compare_runs, read_metrics
from benchmarks.demo_report import Check, limits, print_report
from benchmarks.make_checkpoint import write_checkpoint
from disco_accel.config import DiscoConfig
from disco_accel.execute import watch
from disco_accel.graphfile import write_atomically

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "configs/lora_demo.yaml"
CONFIG = "configs/disco.yaml"
OUT = Path("out/demo")
BUDGETS = ("half", "least", "all")
PICTURES = tuple(OUT / name for name in ("plan.json", "trace.json", "step.png"))


@dataclass
class BudgetRun:
    """One budget: its training run against the run without a plan, and its steps timed in turn with others."""

    name: str
    budget: int
    metrics: dict[str, Any]
    sameness: Sameness
    seconds: float
    steps: dict[str, Any] = field(default_factory=dict)


def announce(text: str) -> None:
    """Say what comes next."""
    print(f"-- {text}", flush=True)


def run(command: list[str], log: Path, extra: dict[str, str] | None = None) -> float:
    """Run a command in the repository with its output in ``log``; returns seconds.

    Raises:
        SystemExit: the command failed; the end of its log is shown.
    """
    # Plans are made anew each time, so that the time they take is seen.
    environment = {**os.environ, "PYTHONPATH": _python_path(), "DISCO_PLAN_CACHE": "null", **(extra or {})}
    began = time.perf_counter()
    with log.open("w") as stream:
        code = subprocess.run(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, env=environment).returncode
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        print(f"{' '.join(command)}\nended with exit code {code}; the end of {log}:\n{tail}", file=sys.stderr)
        raise SystemExit(1)
    return time.perf_counter() - began


def _python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def measure(module: str, log: Path, *arguments: str) -> dict[str, Any]:
    """Run a measuring module with its large allocations counted; return the JSON object that it prints last."""
    run([sys.executable, "-m", module, *arguments], log, {"LD_PRELOAD": str(watch.library())})
    result: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
    return result


def train_plain(output: Path, steps: int) -> float:
    """Train the recipe without a plan."""
    return run([sys.executable, "recipes/lora.py", RECIPE, *_changes(output, steps)], output.with_suffix(".log"))


def train_planned(output: Path, steps: int, budget: int | None) -> float:
    """Train the recipe through the literal command of the README; ``budget`` replaces that of the config."""
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    command = [accelerate, "launch", "--config", CONFIG, "recipes/lora.py", RECIPE, *_changes(output, steps)]
    return run(command, output.with_suffix(".log"), {} if budget is None else {"DISCO_MEMORY_BUDGET": str(budget)})


def _changes(output: Path, steps: int) -> list[str]:
    shutil.rmtree(output, ignore_errors=True)
    return ["--output_dir", str(output), "--max_steps", str(steps)]


def run_budget(name: str, budget: int, plain: Path, steps: int) -> BudgetRun:
    """Train under one budget and compare with the run in ``plain``."""
    announce(f"training under a budget of {budget / (1 << 20):.1f} MiB ({name})")
    output = OUT / f"lora-{name}"
    seconds = train_planned(output, steps, None if name == "half" else budget)
    return BudgetRun(name, budget, read_metrics(output), compare_runs(plain, output), seconds)


def time_steps(budget_run: BudgetRun, peak: int) -> None:
    """Time single steps in turn; those of the half budget are drawn too."""
    announce(f"timing steps in turn ({budget_run.name})")
    arguments = [RECIPE, "--config", CONFIG, "--budget", str(budget_run.budget)]
    half = budget_run.name == "half"
    arguments += ["--rounds", "5" if half else "2"]
    if half:
        arguments += ["-o", str(OUT), "--in-memory-peak", str(peak)]
    budget_run.steps = measure("benchmarks.interleaved", OUT / f"steps-{budget_run.name}.log", *arguments)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns 0 if everything holds."""
    parser = argparse.ArgumentParser(description="LoRA under half the memory, compared with plain training bit for bit")
    parser.add_argument("--budgets", default=",".join(BUDGETS), help="which budgets to train under")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--strict", action="store_true", help="a missed timed figure fails too")
    args = parser.parse_args(argv)
    chosen = [name.strip() for name in args.budgets.split(",")]
    unknown = [name for name in chosen if name not in BUDGETS]
    if unknown:
        parser.error(f"--budgets: {unknown[0]!r} is not one of {', '.join(BUDGETS)}")
    os.chdir(ROOT)
    OUT.mkdir(parents=True, exist_ok=True)
    half = DiscoConfig.from_yaml(CONFIG).resolve().memory_budget
    for stale in PICTURES:
        stale.unlink(missing_ok=True)
    began = time.perf_counter()

    announce("writing a checkpoint")
    write_checkpoint(OUT / "checkpoint")
    announce("measuring the memory of a step without a plan, and the least budget")
    memory = measure("benchmarks.probe", OUT / "probe.log", RECIPE, "--config", CONFIG)
    announce("training without a plan")
    plain = OUT / "lora-plain"
    plain_seconds = train_plain(plain, args.steps)

    budgets = {"half": half, "least": memory["least_budget"], "all": memory["all_budget"]}
    runs = [run_budget(name, budgets[name], plain, args.steps) for name in chosen]
    for budget_run in runs:
        time_steps(budget_run, memory["in_memory_peak"])

    checks: list[Check] = [check for r in runs for check in limits(r, memory, args.steps)]
    if "half" in chosen:
        checks += [Check(f"{path} is written", path.is_file(), timed=False) for path in PICTURES]
    plain_step = median(s["seconds"] for s in read_metrics(plain)["steps"][1:])
    print_report(runs, memory, checks, plain_step=plain_step, plain_seconds=plain_seconds)
    print(f"\nall of it took {time.perf_counter() - began:.0f} s; files are in {OUT}/")
    summary = {"memory": memory, "checks": [c.as_dict() for c in checks], "steps": {r.name: r.steps for r in runs}}
    write_atomically(OUT / "summary.json", json.dumps(summary, indent=1).encode())
    return int(any(not c.holds for c in checks if args.strict or not c.timed))


if __name__ == "__main__":
    raise SystemExit(main())
