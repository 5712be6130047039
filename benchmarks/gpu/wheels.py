"""Packages that a GPU machine without a network lacks, from a folder of wheels, for one run alone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def install(wheels: Path, folder: Path) -> None:
    """Unpack the wheels, without their needs and without a network. Raises CalledProcessError when pip refuses one."""
    files = sorted(str(path) for path in wheels.glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "--no-cache-dir", "--target", str(folder), *files], check=True)


@contextlib.contextmanager
def unpacked(wheels: Path | None, folder: Path) -> Iterator[None]:
    """While it is entered, processes that are started find what ``wheels`` holds, unpacked in ``folder``.

    Raises:
        SystemExit: there are none.
    """
    if wheels is None:
        yield
        return
    if not any(wheels.glob("*.whl")):
        raise SystemExit(f"WHEELS: {wheels} has no .whl files; pip wheel makes them, see docs/benchmarks.md")
    install(wheels, folder)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [before, str(folder)]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
