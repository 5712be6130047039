"""Stage ``build``: the extension and, on CUDA, the allocator decorator; what this machine has."""

from __future__ import annotations

import platform
import time
from typing import Any

import accelerate
import peft
import torch
import transformers

from benchmarks.gpu.stage import Run
from disco_accel.native.backend import prepare_device, workspace_bytes
from disco_accel.native.extension import load_extension


def measure(run: Run) -> dict[str, Any]:
    """Versions, and seconds of both builds (near 0 when they were built before)."""
    figures: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "accelerate": accelerate.__version__,
    }
    began = time.perf_counter()
    load_extension()
    figures["engine_seconds"] = time.perf_counter() - began
    where = run.where
    if where.type == "cuda":
        properties = torch.cuda.get_device_properties(where)
        figures |= {"gpu": properties.name, "gpu_bytes": properties.total_memory, "cuda": torch.version.cuda}
        began = time.perf_counter()
        prepare_device(where)
        figures["decorator_seconds"] = time.perf_counter() - began
        figures["workspace_bytes"] = workspace_bytes(where)
    return figures
