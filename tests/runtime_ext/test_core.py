"""The C++ tests of the core, built and run under ThreadSanitizer, and under Address+UB sanitizers.

``DISCO_RANDOM_PROGRAMS=10000`` makes each run that many random programs instead of a hundred or so, and adds a plain,
optimised one, whose timing is that of users; ``pytest -s`` then shows how long they took.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "runtime_ext"
BUILD_SECONDS = 1200
LONG = "DISCO_RANDOM_PROGRAMS" in os.environ
SANITIZERS = {"thread": "thread", "address": "address,undefined", **({"plain": ""} if LONG else {})}
RUN_SECONDS = 1500 + int(os.environ.get("DISCO_RANDOM_PROGRAMS", "0"))
"""Only what hangs takes so long; a machine with much else to do takes ten times what a quiet one does."""


def run(command: list[str], seconds: int, environment: Mapping[str, str] | None = None) -> str:
    """Output of ``command``; fails the test with that output if it does not exit with 0 in time."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
        env={**os.environ, **(environment or {})},
    )
    assert done.returncode == 0, f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout[-8000:]}"
    return done.stdout


def build(folder: Path, sanitize: str) -> Path:
    """The test program, built in ``folder``; skips where the tools for it are not installed."""
    for tool in ("cmake", "g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed: apt install cmake g++ libgtest-dev")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    # One translation unit each for core and tests: all is compiled once here, so that headers are read once.
    unity = ["-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=0", "-DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON"]
    # Under a sanitizer a program takes twice as long to run as it takes to compile, and half of that with this.
    flags = [f"-DDISCO_SANITIZE={sanitize}", *(["-DCMAKE_CXX_FLAGS=-O1"] if sanitize else [])]
    configure = ["cmake", "-S", str(SOURCE), "-B", str(folder), *flags, *unity, *generator]
    probe = subprocess.run(configure, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    if "GTest" in probe.stderr and "FindPackageHandleStandardArgs" in probe.stderr:
        pytest.skip("GoogleTest is not installed: apt install libgtest-dev")
    assert probe.returncode == 0, probe.stdout + probe.stderr
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
    run(["cmake", "--build", str(folder), "--target", "core_tests", "-j", jobs], BUILD_SECONDS)
    return folder / "core_tests"


@pytest.mark.timeout(BUILD_SECONDS + RUN_SECONDS + 60)
@pytest.mark.parametrize(
    "sanitize",
    [
        pytest.param(flags, id=name, marks=pytest.mark.long if name == "address" else ())
        for name, flags in SANITIZERS.items()
    ],
)
def test_core_holds_its_promises_under(sanitize: str, tmp_path: Path) -> None:
    """Every C++ test of the core passes, and the sanitizers find nothing to report."""
    program = build(tmp_path / "build", sanitize)
    output = run(
        [str(program), "--gtest_brief=1"],
        RUN_SECONDS,
        {"TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"},
    )
    print(sanitize or "plain", output)
    assert "[  PASSED  ]" in output
    assert "FAILED" not in output
