"""Bytes that a step copies between host and GPU, from PyTorch's profiler: for engines that do not count them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch


def link_bytes(step: Callable[[], object]) -> dict[str, int]:
    """Run ``step`` once under the profiler; ``h2d`` and ``d2h`` in bytes."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        return copied(json.loads(trace.read_text())["traceEvents"])


def copied(events: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Sum the bytes of the copies in a Chrome trace by direction."""
    total = {"h2d": 0, "d2h": 0}
    for event in events:
        if event.get("cat") == "gpu_memcpy":
            for direction, word in (("h2d", "HtoD"), ("d2h", "DtoH")):
                if word in event.get("name", ""):
                    total[direction] += int(event.get("args", {}).get("bytes", 0))
    return total
