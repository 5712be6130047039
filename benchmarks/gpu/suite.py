"""Everything that needs a GPU, in one command: builds, checks, measures; one stage that fails hides no other.

    make gpu                    on a GPU machine, with its own python3, torch, transformers, peft and accelerate
    DEVICE=cpu make gpu         the same script on the host device, with tiny shapes

Installs nothing. Each stage runs in a process of its own with a time limit of its own, all of them within nine minutes.
The table comes last; ``gpu.json`` in the folder that ``OUT`` names (default ``out/gpu``) holds every figure.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance

NOT_HERE = "not on this device"
COMMAND = ("-m", "benchmarks.gpu")
"""What each stage's process runs, after the interpreter."""
_ROOT = Path(__file__).resolve().parents[2]
_ALL_SECONDS = 520.0
_LINES = 25


@dataclass(frozen=True, slots=True)
class Stage:
    """``module.function(device, small)`` returns the stage's figures; ``seconds`` is its limit."""

    name: str
    module: str
    seconds: float


STAGES = (
    Stage("self_check", "gpu.self_check", 200),
    Stage("build", "gpu.build", 150),
    Stage("allocator", "gpu.allocator", 60),
    Stage("link", "gpu.link", 60),
    Stage("lookahead", "gpu.lookahead", 60),
    Stage("tests", "gpu.tests", 150),
    Stage("step_8x1024", "gpu.step", 260),
    Stage("step_1x2048", "gpu.step", 120),
    Stage("prefill_1x1024", "gpu.prefill", 120),
    Stage("qlora_1x1024", "gpu.qlora", 240),
    Stage("sanitizer", "gpu.sanitizer", 60),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a stage ended: ``ok``, ``failed``, ``timeout`` or ``skipped``, with its figures or its last words."""

    stage: str
    status: str
    seconds: float
    figures: dict[str, Any]
    words: str = ""


def run_stage(stage: Stage, device: str, small: bool, limit: float) -> Outcome:
    """Run one stage in a process group of its own; whatever is left of it at the limit is killed."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "figures.json", Path(folder) / "log"
        command = [sys.executable, *COMMAND, "--stage", stage.name, "--device", device]
        command += ["--result", str(result), *(["--small"] if small else [])]
        began = time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, cwd=_ROOT, start_new_session=True
            )
            try:
                code = process.wait(timeout=limit)
                status = "ok" if code == 0 else "failed"
            except subprocess.TimeoutExpired:
                status = "timeout"
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds = time.monotonic() - began
        figures = json.loads(result.read_text()) if result.exists() else {}
        if status == "ok" and NOT_HERE in figures:
            status = "skipped"
        words = "" if status in ("ok", "skipped") else "\n".join(log.read_text(errors="replace").splitlines()[-_LINES:])
    return Outcome(stage.name, status, seconds, figures, words)


def run_all(stages: Sequence[Stage], device: str, small: bool, out: Path) -> list[Outcome]:
    """Run the stages in order, print each result as it comes, and keep ``gpu.json`` up to date."""
    outcomes: list[Outcome] = []
    head = provenance("make gpu", [], device)
    end = time.monotonic() + _ALL_SECONDS
    for stage in stages:
        limit = min(stage.seconds, end - time.monotonic())
        if limit < 1:
            outcome = Outcome(stage.name, "timeout", 0.0, {}, "no time was left")
        else:
            outcome = run_stage(stage, device, small, limit)
        outcomes.append(outcome)
        print(f"{stage.name}: {outcome.status} after {outcome.seconds:.1f} s", flush=True)
        if outcome.words:
            print("    " + outcome.words.replace("\n", "\n    "), flush=True)
        content = {**head, "device": device, "small": small, "stages": {o.stage: _as_dict(o) for o in outcomes}}
        (out / "gpu.json").write_text(json.dumps(content, indent=1))
    return outcomes


def _as_dict(outcome: Outcome) -> dict[str, Any]:
    return {
        "status": outcome.status,
        "seconds": round(outcome.seconds, 2),
        "figures": outcome.figures,
        "words": outcome.words,
    }


def table(outcomes: Sequence[Outcome]) -> str:
    """One line for each figure, under its stage."""
    lines = [f"{'stage':<14} {'status':<8} {'s':>6}  figures"]
    for outcome in outcomes:
        head = f"{outcome.stage:<14} {outcome.status:<8} {outcome.seconds:6.1f}  "
        rows = [f"{key} = {_short(value)}" for key, value in outcome.figures.items()] or [""]
        lines += [(head if i == 0 else " " * len(head)) + row for i, row in enumerate(rows)]
    return "\n".join(lines)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(item)}" for key, item in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "[" + ", ".join(_short(item) for item in value) + "]"
    return str(value)


def _run_here(name: str, device: str, small: bool, result: str) -> int:
    stage = next(s for s in STAGES if s.name == name)
    figures = importlib.import_module(f"benchmarks.{stage.module}").measure(device, small, stage.name)
    Path(result).write_text(json.dumps(figures))
    # A stage that measured something wrong says so in its figures.
    return 1 if figures.get("wrong") else 0


def main(argv: list[str] | None = None) -> int:
    """Command line; exit 0 when no stage failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--only", nargs="*", choices=[s.name for s in STAGES], help="these stages alone")
    parser.add_argument("--stage", choices=[s.name for s in STAGES], help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.stage:
        return _run_here(args.stage, args.device, args.small, args.result)
    out = Path(os.environ.get("OUT") or "out/gpu")
    out.mkdir(parents=True, exist_ok=True)
    stages = [s for s in STAGES if not args.only or s.name in args.only]
    outcomes = run_all(stages, args.device, args.small, out)
    print()
    print(table(outcomes))
    return 0 if all(o.status in ("ok", "skipped") for o in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
