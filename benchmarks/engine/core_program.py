"""Programs of the engine's core alone, in C++: ``runtime_ext/tests/bench_*.cpp``."""

from __future__ import annotations

import subprocess
from pathlib import Path

_SOURCE = Path(__file__).resolve().parents[2] / "runtime_ext"


def build(name: str, folder: Path) -> Path:
    """The program ``name``, optimised, built in ``folder``. CalledProcessError where it does not compile."""
    subprocess.run(["cmake", "-S", str(_SOURCE), "-B", str(folder)], check=True, stdout=subprocess.DEVNULL)
    command = ["cmake", "--build", str(folder), "--target", name, "-j", "2"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / name


def numbers_of(command: list[str]) -> list[list[float]]:
    """The numbers of each line that ``command`` prints."""
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [[float(cell) for cell in line.split()] for line in output.splitlines()]
