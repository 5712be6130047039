"""Everything that needs a GPU, in two commands: checks, then measurements, the most valuable first.

    make gpu ONLY=check         builds, self-check, tests/gpu, allocations of ops: two and a half minutes
    make gpu                    measurements, within eight minutes, with the machine's python3 and packages
    DEVICE=cpu make gpu         the same script on the host device, with tiny shapes

Installs nothing but the wheels in the folder ``WHEELS``, for this run alone. Stages that share a model run in one
process. Each has a limit; one that fails or is ended hides no other: the next runs in a new process. One for which the
time that is left does not suffice is left out. Figures and logs are in the folder that ``OUT`` names (default
``out/gpu``) as they come; ``gpu.json`` there holds all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.provenance import provenance
from benchmarks.gpu.stage import NOT_HERE, Run, Stage, begun_file, figures_file, write
from benchmarks.gpu.wheels import unpacked

COMMAND = ("-m", "benchmarks.gpu")
"""What each process runs, after the interpreter."""
_ROOT = Path(__file__).resolve().parents[2]
_SECONDS = {True: 150.0, False: 480.0}
"""Of all stages, of checks and of measurements."""
_LINES = 25
_POLL = 0.1
_PATIENCE = 4
"""Limits are those of a GPU machine; with tiny shapes any machine may try the script."""
_LAST_WORDS_SECONDS = 5.0

STAGES = (
    Stage("build", "build", "gpu.build", 50, 120, check=True),
    Stage("self_check", "self_check", "gpu.self_check", 15, 60, check=True),
    Stage("tests", "tests", "gpu.tests", 55, 120, check=True),
    Stage("allocator", "allocator", "gpu.allocator", 20, 60, check=True),
    Stage("8b_eager", "8b", "gpu.training", 26, 90),
    Stage("8b_no_checkpointing", "8b", "gpu.training", 5, 40),
    Stage("8b_ours_72GiB", "8b", "gpu.training", 60, 120),
    Stage("8b_ours_24GiB", "8b", "gpu.training", 23, 60),
    Stage("8b_ours_8GiB", "8b", "gpu.training", 36, 80),
    Stage("8b_ours_72GiB_unfused", "8b", "gpu.training", 20, 60),
    Stage("8b_eager_again", "8b", "gpu.training", 6, 40),
    Stage("8b_prompt", "8b", "gpu.prompt", 25, 80),
    Stage("8b_evaluation", "8b", "gpu.evaluation", 12, 50),
    Stage("8b_checkpoint_offload", "8b", "gpu.training", 8, 40),
    Stage("70b_eager", "70b", "gpu.training", 54, 90),
    Stage("70b_ours_22GiB", "70b", "gpu.training", 80, 150),
    Stage("1b_eager", "1b", "gpu.training", 8, 40),
    Stage("1b_no_checkpointing", "1b", "gpu.training", 3, 20),
    Stage("1b_ours_16GiB", "1b", "gpu.training", 40, 100),
    Stage("1b_ours_2100MiB", "1b", "gpu.training", 8, 40),
    Stage("1b_ours_16GiB_unfused", "1b", "gpu.training", 8, 40),
    Stage("8b_zero3", "zero3", "gpu.peer", 96, 130),
    Stage("8b_soup", "soup", "gpu.peer", 70, 110),
    Stage("1.5b_full", "full", "gpu.full_training", 60, 100),
    Stage("1b_compile", "1b_compile", "gpu.training", 45, 80),
    Stage("8b_compile", "compile", "gpu.training", 80, 120),
    Stage("lookahead", "lookahead", "gpu.lookahead", 25, 50),
    Stage("link", "link", "gpu.link", 15, 40),
    Stage("sanitizer", "sanitizer", "gpu.sanitizer", 30, 60),
)
"""``link`` and the checks are apart from what they are needed for, so that they can be left out."""
_ALWAYS = ("build", "self_check")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a stage ended: ``ok``, ``failed``, ``timeout``, ``skipped`` (not on this device), or ``left out`` (no time),
    with its figures, and its last words if something went wrong."""

    stage: str
    status: str
    seconds: float
    figures: dict[str, Any]
    words: str = ""


def run_process(stages: Sequence[Stage], device: str, small: bool, out: Path, end: float) -> list[Outcome]:
    """Run ``stages`` in one process, in a process group of its own, until one of them fails or takes too long: the
    outcomes of those that were reached. ``end``: of ``time.monotonic``."""
    log = out / f"{stages[0].name}.log"
    command = [sys.executable, *COMMAND, "--run", *(stage.name for stage in stages), "--device", device]
    began = time.monotonic()
    outcomes: list[Outcome] = []
    with log.open("w") as output:
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1", "OUT": str(out)}
        process = subprocess.Popen(
            [*command, *(["--small"] if small else [])],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=_ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            for i, stage in enumerate(stages):
                following = stages[i + 1] if i + 1 < len(stages) else None
                limit = stage.limit * (_PATIENCE if small else 1)
                status = _wait(process, following, out, min(began + limit, end))
                outcomes.append(_outcome(stage, status, time.monotonic() - began, out, log))
                print(_line(outcomes[-1]), flush=True)
                if status != "over":
                    break
                began = time.monotonic()
        finally:
            _end(process)
    return outcomes


def _wait(process: subprocess.Popen[bytes], following: Stage | None, out: Path, end: float) -> str:
    """Until the stage that ``process`` is at is over: the next one has begun, or the process has ended."""
    while time.monotonic() < end:
        code = process.poll()
        if following is not None and begun_file(out, following.name).exists():
            return "over"
        if code is not None:
            return "over" if code == 0 and following is None else "failed"
        time.sleep(_POLL)
    return "timeout"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Where it stands goes to its log; what is left of its group is killed."""
    if process.poll() is None:
        process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_WORDS_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _outcome(stage: Stage, status: str, seconds: float, out: Path, log: Path) -> Outcome:
    path = figures_file(out, stage.name)
    figures = json.loads(path.read_text()) if path.exists() else {}
    if status == "over":
        # A stage that measured something wrong says so in its figures; those behind it go on.
        status = "failed" if figures.get("wrong") else "skipped" if NOT_HERE in figures else "ok"
        words = str(figures.get("wrong", ""))
    else:
        words = "\n".join(log.read_text(errors="replace").splitlines()[-_LINES:])
    return Outcome(stage.name, status, seconds, figures, words)


def _line(outcome: Outcome) -> str:
    line = f"{outcome.stage}: {outcome.status} after {outcome.seconds:.1f} s"
    return line + ("\n    " + outcome.words.replace("\n", "\n    ") if outcome.words else "")


def run_all(stages: Sequence[Stage], device: str, small: bool, out: Path, seconds: float) -> list[Outcome]:
    """Run the stages in order, print each result as it comes, and keep ``gpu.json`` up to date."""
    outcomes: list[Outcome] = []
    head = provenance("make gpu", [], device)
    end = time.monotonic() + seconds
    for stage in stages:
        figures_file(out, stage.name).unlink(missing_ok=True)
        begun_file(out, stage.name).unlink(missing_ok=True)
    left = list(stages)
    while left:
        if end - time.monotonic() < (1.0 if small else left[0].estimate):
            outcomes.append(Outcome(left.pop(0).name, "left out", 0.0, {}))
            print(f"{outcomes[-1].stage}: left out, {max(0.0, end - time.monotonic()):.0f} s are left", flush=True)
            continue
        group = [stage for stage in left if stage.process == left[0].process]
        expected = "" if small else f", about {sum(stage.estimate for stage in group):.0f} s on a GPU"
        print(f"{', '.join(stage.name for stage in group)}{expected}", flush=True)
        found = run_process(group, device, small, out, end)
        outcomes += found
        over = {outcome.stage for outcome in found}
        left = [stage for stage in left if stage.name not in over]
        rows = [_as_dict(outcome) for outcome in outcomes]
        write(out / "gpu.json", {"benchmark": "gpu", **head, "device": device, "small": small, "rows": rows})
        if found[0].status not in ("ok", "skipped") and found[0].stage == "build":
            print("what cannot be built measures nothing", flush=True)
            break
    return outcomes


def _as_dict(outcome: Outcome) -> dict[str, Any]:
    return {
        "stage": outcome.stage,
        "status": outcome.status,
        "seconds": round(outcome.seconds, 2),
        "figures": outcome.figures,
        "words": outcome.words,
    }


def table(outcomes: Sequence[Outcome]) -> str:
    """One line for each figure, under its stage."""
    lines = [f"{'stage':<22} {'status':<8} {'s':>6}  figures"]
    for outcome in outcomes:
        head = f"{outcome.stage:<22} {outcome.status:<8} {outcome.seconds:6.1f}  "
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


def _run_here(names: Sequence[str], device: str, small: bool, out: Path) -> int:
    """In the stages' process: it ends with the first one that raises, for what that leaves behind is not known."""
    by_name: Mapping[str, Stage] = {stage.name: stage for stage in STAGES}
    for name in names:
        begun_file(out, name).write_text(str(os.getpid()))
        print(f"== {name}", flush=True)
        run = Run(name, device, small, out)
        try:
            figures = importlib.import_module(f"benchmarks.{by_name[name].module}").measure(run)
        except Exception:
            traceback.print_exc()
            return 1
        run.keep(figures)
        print(json.dumps(figures, indent=1), flush=True)
    return 0


def _chosen(only: Sequence[str]) -> list[Stage]:
    if not only:
        return [s for s in STAGES if not s.check or s.name in _ALWAYS]
    return [s for s in STAGES if s.name in only or s.process in only or ("check" in only and s.check)]


def main(argv: list[str] | None = None) -> int:
    """Command line; exit 0 when no stage failed."""
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    groups = ["check", *dict.fromkeys(stage.process for stage in STAGES if stage.process not in names)]
    parser.add_argument("--only", nargs="*", choices=[*groups, *names], help="these stages alone")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that the machine lacks")
    parser.add_argument("--seconds", type=float, help="for all stages together")
    parser.add_argument("--run", nargs="*", choices=names, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    out = Path(os.environ.get("OUT") or "out/gpu").resolve()
    if args.run:
        return _run_here(args.run, args.device, args.small, out)
    out.mkdir(parents=True, exist_ok=True)
    stages = _chosen(args.only)
    seconds = args.seconds or _SECONDS[all(stage.check for stage in stages)]
    with tempfile.TemporaryDirectory() as folder, unpacked(args.wheels, Path(folder)):
        outcomes = run_all(stages, args.device, args.small, out, seconds)
    print()
    print(table(outcomes))
    return 0 if all(o.status in ("ok", "skipped", "left out") for o in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
