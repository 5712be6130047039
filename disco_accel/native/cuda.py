"""What a run on a CUDA device needs beside the engine: the device's index, timing, pinned memory, workspaces."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from disco_accel.errors import ConfigError, ExecutionError
from disco_accel.native.extension import load_allocator_shim, load_extension

_TIMED_RUNS = 5


def run_device(name: str) -> torch.device:
    """The device that ``name`` (cpu, cuda, cuda:1) means now; of a CUDA device the index is always given.

    Raises ConfigError when it is another kind of device or not there.
    """
    device = torch.device(name)
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ConfigError(f"device: {name} is not supported; use cpu or cuda")
    if not torch.cuda.is_available():
        raise ConfigError(f"device: {name} does not work here, torch sees no CUDA device; use cpu or auto")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device: {name} is not there, this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def current(device: torch.device | None) -> AbstractContextManager[object]:
    """``device`` is PyTorch's current one inside; nothing for the CPU or None.

    Calls into CUDA that name no device make a context on the current one, some hundred MiB of its memory. PyTorch's
    guard sets the device from before back without making one there.
    """
    return nullcontext() if device is None or device.type != "cuda" else torch.cuda.device(device)


def prepare_device(device: torch.device) -> None:
    """Make ops on ``device`` recordable and plannable: on CUDA, the allocator decorator is in place. Raises
    ExtensionError when it cannot be built."""
    load_extension()
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            load_allocator_shim()


def median_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median time that ``run`` keeps the device's current stream busy, or its launch if that takes longer."""
    with torch.cuda.device(device):
        samples = []
        for _ in range(_TIMED_RUNS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(samples)


@functools.cache
def workspace_bytes(device: torch.device) -> int:
    """Bytes of the workspaces that matrix products take on each stream of each thread, measured; 0 on the CPU.

    ``device``: with its index. The calling thread's own workspaces are released; its next product takes them again.
    """
    if device.type != "cuda":
        return 0
    operand = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
    bias = torch.zeros(16, dtype=torch.bfloat16, device=device)
    results = torch.empty_like(operand), torch.empty_like(operand)
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated(device)
    torch.mm(operand, operand, out=results[0])
    torch.addmm(bias, operand, operand, out=results[1])
    taken = torch.cuda.memory_allocated(device) - before
    torch._C._cuda_clearCublasWorkspaces()
    return taken


def release_workspaces(device: torch.device) -> None:
    """Give the workspaces of all threads and streams back, the engine's included.

    Each is taken again at the next product that needs it, and by an engine before its next op.
    """
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        load_extension()
        torch.ops.disco_accel.release_unused_workspaces()


def pin(tensor: torch.Tensor, device: torch.device | None = None) -> Any:
    """Register the pages under a host tensor with CUDA, so that copies from and to it are asynchronous.

    ``device``: one that is used anyway, None for the current one; all devices may copy from the pages then. They stay
    registered as long as the returned object lives, which keeps the tensor too. Raises ExecutionError with
    CUDA's reason when the system does not allow it.
    """
    load_extension()
    try:
        with current(device):
            return torch.classes.disco_accel.Pinned(tensor)
    except (RuntimeError, ValueError) as error:
        raise ExecutionError(
            f"pinning {tensor.nbytes} bytes of host memory failed: {error}; the limit of locked memory (ulimit -l) or "
            "free memory may be too small"
        ) from error
