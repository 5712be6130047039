"""``make emulated``: the tests under several settings of the emulated device, several at a time, and a table.

    python -m tests.emulated.modes [--only NAME ...] [--out FOLDER]

Each mode's output goes to a file of its own; that of a mode that fails is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.emulated.build import ROOT, Libraries, build
from tests.emulated.run import run

_LINES_SHOWN = 60
PYTEST = ("-m", "pytest", "-p", "tests.emulated.plugin", "-p", "no:cacheprovider", "-q", "--tb=short", "--durations=5")
_EMULATED = tuple(
    f"tests/emulated/test_{name}.py"
    for name in ("order", "engine", "calls", "launch_graphs", "fused", "page_locking", "update_faults")
)
_STEPS = ("tests/gpu", *_EMULATED)
"""Run in every mode: what goes wrong when pieces of work come in another order."""
_SEVERAL = ("tests/emulated/test_several_devices.py", "tests/emulated/test_steps_on_several_gpus.py")
_STORE = ("tests/emulated/test_store_on_gpu.py", "tests/emulated/test_store_training.py")
_JITTER_US = 500.0
"""The same as that under which planted faults are looked for (``mutants.py``)."""
_JITTER = {"EMULATED_JITTER_US": _JITTER_US, "EMULATED_SEED": 1}
_PIECES = {"EMULATED_COPY_PIECE": 20_000}
"""Bytes: copies of the weights of these tests go in several pieces."""
_CUDA_12_8, _NO_BATCHES = {"EMULATED_CUDART": 12080}, {"EMULATED_CUDART": 12060}
"""Versions whose batches of copies have other arguments than those of CUDA 13, or that have none."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A command of this environment's Python, and what the devices are like."""

    name: str
    arguments: tuple[str, ...]
    settings: Mapping[str, object] = field(default_factory=dict)


def _tests(*paths: str) -> tuple[str, ...]:
    return (*PYTEST, *paths)


MODES = (
    *(
        Mode(f"jitter {seed}", _tests(*_STEPS), {"EMULATED_JITTER_US": _JITTER_US, "EMULATED_SEED": seed, **more})
        for seed, more in ((1, {}), (2, {**_PIECES, **_CUDA_12_8}), (3, _NO_BATCHES))
    ),
    Mode("steps", _tests(*_STEPS)),
    Mode("slow link", _tests(*_STEPS), {"EMULATED_LINK_GB_S": 0.05, **_PIECES}),
    Mode(
        "families",
        _tests(*(f"tests/emulated/test_{name}.py" for name in ("families", "host_optimizer", "shared_base_on_gpu"))),
    ),
    Mode("stages", ("-m", "benchmarks.gpu", "--device", "cuda", "--small")),
    Mode("quantised", _tests("tests/emulated/test_quantised.py"), {"PYTHONPATH": Path(sys.prefix) / "quantised"}),
    Mode("4 devices", _tests("tests/emulated/test_second_device.py", *_SEVERAL), {"EMULATED_DEVICES": 4}),
    Mode("2 devices", _tests("tests/emulated/test_second_device.py", *_SEVERAL), {"EMULATED_DEVICES": 2, **_PIECES}),
    Mode("no peers", _tests(*_SEVERAL), {"EMULATED_DEVICES": 4, "EMULATED_PEERS": "none", **_JITTER}),
    Mode("wrong peers", _tests(*_SEVERAL), {"EMULATED_DEVICES": 2, "EMULATED_PEERS": "wrong"}),
    Mode("late peers", _tests(*_SEVERAL), {"EMULATED_DEVICES": 3, **_JITTER}),
    Mode("doors", _tests("tests/emulated/test_trainer.py", "tests/emulated/test_processes.py")),
    Mode("store", _tests(*_STORE)),
    Mode("late store", _tests(*_STORE), {"EMULATED_LINK_GB_S": 0.5, **_JITTER}),
    Mode("cudnn attention", _tests("tests/gpu", "-k", "bf16"), {"EMULATED_CUDNN_SDP": 1}),
    Mode("device", _tests("tests/emulated/test_device.py")),
)
"""The longest first, so that none of them is left alone at the end."""

# Compiled before the modes start, which would all wait for it.
BUILD_ENGINE = """
import torch
from disco_accel.native.backend import prepare_device
prepare_device(torch.device("cuda", 0))
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a mode ended; ``words`` are the last lines of its output."""

    mode: str
    status: int
    seconds: float
    words: Sequence[str]


def run_mode(mode: Mode, libraries: Libraries, out: Path) -> Outcome:
    """Its output goes to ``out``."""
    log = out / (mode.name.replace(" ", "-") + ".log")
    begin = time.monotonic()
    with log.open("w") as output:
        status = run([sys.executable, *mode.arguments], libraries, {"OUT": out / "gpu", **mode.settings}, output)
    words = log.read_text(errors="replace").splitlines()
    outcome = Outcome(mode.name, status, time.monotonic() - begin, words)
    print(f"{mode.name}: {_verdict(outcome)} after {outcome.seconds:.0f} s", flush=True)
    return outcome


def _verdict(outcome: Outcome) -> str:
    return "ok" if outcome.status == 0 else f"FAILED ({outcome.status})"


def table(outcomes: Sequence[Outcome]) -> str:
    """One line for each mode: its verdict, time and last words."""
    rows = [f"{'mode':<16} {'verdict':<12} {'s':>5}  last line"]
    for outcome in outcomes:
        last = next((line for line in reversed(outcome.words) if line.strip()), "")
        rows.append(f"{outcome.mode:<16} {_verdict(outcome):<12} {outcome.seconds:5.0f}  {last.strip()}")
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> int:
    """Command line; exit 0 when no mode failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=[m.name for m in MODES], help="these modes alone")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "emulated" / "logs")
    parser.add_argument("--at-once", type=int, default=1 + (os.cpu_count() or 1), help="modes at the same time")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    libraries = build()
    if run([sys.executable, "-c", BUILD_ENGINE], libraries, {}) != 0:
        return 1
    modes = [m for m in MODES if not args.only or m.name in args.only]
    begin = time.monotonic()
    with ThreadPoolExecutor(args.at_once) as pool:
        outcomes = list(pool.map(lambda mode: run_mode(mode, libraries, args.out), modes))
    for outcome in outcomes:
        if outcome.status != 0:
            print(f"\n-- {outcome.mode}\n" + "\n".join(outcome.words[-_LINES_SHOWN:]))
    print("\n" + table(outcomes) + f"\n{time.monotonic() - begin:.0f} s in all")
    return int(any(outcome.status != 0 for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
