"""Where, when and with what a result was measured: the head of every file of results."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "peft", "accelerate", "deepspeed", "axolotl")


def provenance(command: str, argv: Sequence[str], device: str) -> dict[str, Any]:
    """``device`` is cpu, cuda, or ``simulated: NAME`` for what no device ran. Where ``-o`` points is left out."""
    words = [w for before, w in pairwise(["", *argv]) if not {before, w} & {"-o", "--output"}]
    return {
        "command": " ".join([command, *map(shlex.quote, words)]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": _machine(device),
        "simulated": device.startswith("simulated"),
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": _commit(),
        "load": round(os.getloadavg()[0], 2),
    }


def _machine(device: str) -> str:
    host = f"{os.cpu_count()} cores of {_processor()}, {round(_ram() / 2**30)} GiB"
    if device == "cuda":
        import torch

        found = torch.cuda.get_device_properties(0)
        return f"{found.name}, {round(found.total_memory / 2**30)} GiB, CUDA {torch.version.cuda}; {host}"
    return f"host device on {host}" if device == "cpu" else device


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _ram() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    here = Path(__file__).resolve().parent
    try:
        command = ["git", "-C", str(here), "rev-parse", "--short", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
