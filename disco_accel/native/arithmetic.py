"""What the bits of PyTorch's own elementwise ops depend on, beside the op and its operands: processor, libraries,
threads, settings. A fact about bits that was found once holds where all of this is the same."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from disco_accel.native.backend import backend_of

_OF_PROCESSOR = frozenset(
    (
        *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
        *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features"),
    )
)
"""Lines of /proc/cpuinfo: those of x86-64, and those of 64-bit ARM."""
_VARIABLES = re.compile(r"(?:ATEN|MKL|DNNL|ONEDNN)_(?!NUM_THREADS$)\w+|GLIBC_TUNABLES|LD_PRELOAD")
"""They choose the code that libraries run. Threads are counted by themselves."""
_MATH_LIBRARY = re.compile(r"\s(/\S*/libm[.-]\S*)$", re.MULTILINE)
_SMALLEST = 2.0**-149
"""A denormal number of float32."""


def arithmetic_of(device: torch.device) -> dict[str, str]:
    """All of it for ``device``, in this thread, by name."""
    backend = backend_of(device)
    switches = {name: getattr(torch._C, name)() for name in backend.switches if hasattr(torch._C, name)}
    keeps_denormals = bool((torch.full((1,), _SMALLEST, dtype=torch.float32, device="cpu") * 1.0).item())
    return {
        **{f"device {name}": fact for name, fact in backend.identity().items()},
        **_of_process(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "denormals": str(keeps_denormals),
        "default": str(torch.get_default_dtype()),
        "switches": str(sorted(switches.items())),
        "variables": _digest(f"{n}={v}" for n, v in sorted(os.environ.items()) if _VARIABLES.fullmatch(n)),
    }


@functools.cache
def processor() -> tuple[str, ...]:
    """Lines that tell the model of the host's first processor, and its instructions."""
    found = []
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if not line.strip():
                    break
                if line.partition(":")[0].strip() in _OF_PROCESSOR:
                    found.append(line.strip())
    except OSError:
        return (platform.processor(),)
    return tuple(found)


def kernels_of(ops: Iterable[str], device: torch.device) -> list[str]:
    """Where the kernel of each of ``ops`` (as aten::add.Tensor) on ``device`` comes from: another library may have put
    its own in the place of PyTorch's."""
    return [line for op in ops for line in _registered(op) if line.startswith(f"{device.type.upper()}:")]


def _registered(op: str) -> list[str]:
    table: str = torch._C._dispatch_dump_table(op)
    return table.splitlines()


@functools.cache
def _of_process() -> dict[str, str]:
    """What does not change while a process runs. Libraries are named by size and time, which a new one has others of:
    to read them takes half a second."""
    libraries = [*sorted((Path(torch.__file__).parent / "lib").glob("*.so*")), *_math_libraries()]
    return {
        "machine": platform.machine(),
        "processor": _digest(processor()),
        "libc": " ".join(platform.libc_ver()),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "libraries": _digest(f"{path} {_status(path)}" for path in libraries),
    }


def _math_libraries() -> list[Path]:
    try:
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [Path(path) for path in sorted(set(_MATH_LIBRARY.findall(mapped)))]


def _status(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return "gone"
    return f"{status.st_size} {status.st_mtime_ns}"


def _digest(words: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()
