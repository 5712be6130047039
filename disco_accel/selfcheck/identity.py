"""What an answer of the self-check holds for: the device, its driver, PyTorch and this package's own sources.

A change of any of these asks for a new check. What depends on the model is not in it: plans are verified by themselves.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from disco_accel.version import __version__

_PACKAGE = Path(__file__).resolve().parents[1]
_PARTS = ("capture", "execute", "graph", "measure", "native", "plan", "runtime_ext", "selfcheck", "simulate", "verify")
_KINDS = (".py", ".cpp", ".h", ".cu")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def identity_of(device: torch.device) -> dict[str, str]:
    """What a check on ``device`` is about, for people to read and for ``key_of``."""
    software = {
        "disco_accel": __version__,
        "sources": _sources(),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }
    if device.type == "cpu":
        return {"device": f"cpu {platform.processor() or platform.machine()}", **software}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "uuid": str(getattr(properties, "uuid", "unknown")),
        "capability": f"{properties.major}.{properties.minor}",
        "processors": str(properties.multi_processor_count),
        "memory": str(properties.total_memory),
        "driver": _driver(),
        "cuda": str(torch.version.cuda),
        "allocator": _allocator(),
        **software,
    }


def key_of(identity: Mapping[str, str]) -> str:
    """The sha256 of ``identity``, in hex."""
    return hashlib.sha256(json.dumps(dict(sorted(identity.items()))).encode()).hexdigest()


@functools.cache
def _sources() -> str:
    """A hash of what captures, plans and runs, Python and C++."""
    digest = hashlib.sha256()
    for part in _PARTS:
        # The last part may be a link to another folder, which rglob would not follow.
        folder = (_PACKAGE / part).resolve()
        for path in sorted(p for p in folder.rglob("*") if p.suffix in _KINDS and p.is_file()):
            digest.update(f"{part}/{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _driver() -> str:
    """The kernel module's version where the system tells it, and the newest CUDA that the driver runs."""
    try:
        module = _DRIVER_FILE.read_text(encoding="utf-8", errors="replace").splitlines()[0]
    except (OSError, IndexError):
        module = "unknown module"
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        status = -1
    return f"{module}; CUDA {version.value}" if status == 0 else module


def _allocator() -> str:
    """The allocator behind PyTorch's, which ``PYTORCH_CUDA_ALLOC_CONF`` chooses."""
    expandable = torch.cuda.memory._snapshot()["allocator_settings"].get("expandable_segments", False)
    return torch.cuda.get_allocator_backend() + (", expandable segments" if expandable else "")
