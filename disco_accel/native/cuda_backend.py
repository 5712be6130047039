"""A CUDA device: its index, timing, page-locked memory, workspaces. The engine's own part is in C++."""

from __future__ import annotations

import ctypes
import functools
import logging
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import torch

from disco_accel.errors import ConfigError, ExecutionError
from disco_accel.graph.taskgraph import TensorSpec
from disco_accel.native.device_types import CUDA
from disco_accel.native.engine_class import OpTable
from disco_accel.native.engine_numbers import PEER_PATHS
from disco_accel.native.extension import load_allocator_shim, load_extension
from disco_accel.native.loads import Load, cuda_loads
from disco_accel.simulate.gpus import gpu_named
from disco_accel.sizes import format_size

logger = logging.getLogger(__name__)

GPU_COPY_PIECE = 16 << 20
"""Bytes of a piece of a copy, 0.3 to 1.3 ms of a link of 50 to 12 GB/s. Not measured: an urgent copy waits less for
smaller ones, which take the loop thread more launches."""
_PROPERTIES = (
    *("name", "major", "minor", "multi_processor_count", "warp_size", "regs_per_multiprocessor", "total_memory"),
    *("max_threads_per_multi_processor", "max_threads_per_block", "shared_memory_per_block", "L2_cache_size"),
    *("shared_memory_per_block_optin",),
)
_TIMED_RUNS = 5
_PROBE_CYCLES = 2_000_000
_MOST_CYCLES = 1_000_000_000
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_REFUSED = re.compile(r"cudaHostRegister failed with error (1|2|304|800|801):")
"""Invalid value, memory, operating system, not permitted, not supported: answers of drivers at a limit."""
_refusals: list[ExecutionError] = []
"""The first refusal to lock memory, which was told."""


class LockingRefused(ExecutionError):
    """The system does not lock so much memory. Copies from it and to it are right all the same."""


@dataclass(frozen=True, slots=True)
class CudaBackend:
    """One GPU; see ``Backend``."""

    device: torch.device
    separate_memory = CUDA.separate_memory
    alignment = 512
    rate_dtype = "float32"
    speed = gpu_named("a100-40g").speed
    switches = (
        *("_get_cudnn_enabled", "_get_cudnn_benchmark", "_get_cudnn_deterministic", "_get_cudnn_allow_tf32"),
        *("_get_cublas_allow_tf32", "_get_cublas_allow_fp16_accumulation", "_get_fa3_sdp_enabled"),
        *("_get_cublas_allow_fp16_reduced_precision_reduction", "_get_cublas_allow_bf16_reduced_precision_reduction"),
        *("_get_blas_preferred_backend", "_get_linalg_preferred_backend"),
    )
    precisions = "cuda"
    allocates_in_blocks = True
    needs_self_check = True
    has_streams = True
    has_cudnn = True

    @property
    def copy_piece(self) -> int | None:
        return GPU_COPY_PIECE

    def is_there(self) -> bool:
        return torch.cuda.is_available()

    def count(self) -> int:
        return torch.cuda.device_count()

    def current_index(self) -> int:
        return torch.cuda.current_device()

    def memory_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device.index)[1])

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device.index)[0])

    def facts(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.device)
        free, total = torch.cuda.mem_get_info(self.device.index)
        capability = f"{properties.major}.{properties.minor}"
        return {
            **{"kind": CUDA.name, "name": properties.name, "memory": total, "free": free, "capability": capability},
            "uuid": str(getattr(properties, "uuid", "unknown")),
            "driver": _driver(),
            "cuda_runtime": torch.version.cuda,
            # PyTorch tells it as 0 or 1.
            "shares_host_memory": bool(getattr(properties, "is_integrated", False)),
        }

    def resolve(self) -> torch.device:
        """With PyTorch's current index if none was given."""
        device = self.device
        if not torch.cuda.is_available():
            raise ConfigError(f"device: {device} does not work here, torch sees no CUDA device; use cpu or auto")
        index = torch.cuda.current_device() if device.index is None else device.index
        count = torch.cuda.device_count()
        if index >= count:
            raise ConfigError(f"device: {device} is not there, this machine has {count} CUDA devices")
        return torch.device("cuda", index)

    def others(self, indices: Sequence[int], count: int) -> list[torch.device]:
        """One GPU may stand for several devices. All are of one model: an op is measured on the first, and planned so
        for all."""
        devices = [CudaBackend(torch.device("cuda", index)).resolve() for index in indices[:count]] or [self.device]
        if len(devices) != count:
            raise ConfigError(
                f"devices: the plan has {count} devices beside those in host memory, and {_named(devices)} "
                f"{'is' if len(devices) == 1 else 'are'} given; name {count} GPUs"
            )
        if devices and devices[0] != self.device:
            raise ConfigError(f"devices: the first is {devices[0]}, but device is {self.device}; name that one first")
        models = {CudaBackend(device).hardware(): device for device in reversed(devices)}
        if len(models) > 1:
            listed = ", ".join(f"{device} is {model}" for model, device in reversed(models.items()))
            raise ConfigError(f"devices: one plan runs on GPUs of one model, but {listed}; name GPUs that are alike")
        for source, target in permutations(dict.fromkeys(devices), 2):
            _tell_of_peer_path(source, target)
        return devices

    def copies_straight(self, devices: Sequence[torch.device]) -> bool:
        pairs = permutations(dict.fromkeys(devices), 2)
        return all(peer_path(source, target) == "direct" for source, target in pairs)

    def hardware(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def target(self) -> dict[str, Any] | None:
        """``kind``, and the properties that Inductor may ask for. Some are missing in older versions of PyTorch."""
        found = torch.cuda.get_device_properties(self.device)
        known = {name: getattr(found, name) for name in _PROPERTIES if hasattr(found, name)}
        return {"kind": self.device.type, **known}

    def identity(self) -> dict[str, str]:
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "device": properties.name,
            "uuid": str(getattr(properties, "uuid", "unknown")),
            "capability": f"{properties.major}.{properties.minor}",
            "processors": str(properties.multi_processor_count),
            "memory": str(properties.total_memory),
            "driver": _driver(),
            "cuda": str(torch.version.cuda),
            "allocator": _allocator(),
        }

    def prepare(self) -> None:
        """Also puts the decorator of the caching allocator in place."""
        load_extension()
        torch.cuda.init()
        with torch.cuda.device(self.device):
            load_allocator_shim()

    def current(self) -> AbstractContextManager[object]:
        """Calls into CUDA that name no device make a context on the current one, some hundred MiB of its memory."""
        return torch.cuda.device(self.device)

    def arena(self, nbytes: int) -> torch.Tensor:
        """One block of the caching allocator."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def is_arena(self, tensor: torch.Tensor) -> bool:
        del tensor
        return True

    def touched_bytes(self, arena: torch.Tensor) -> int:
        return arena.numel()

    def alias(self, arena: torch.Tensor, offset: int, nbytes: int, spec: TensorSpec) -> torch.Tensor:
        flat = arena[offset : offset + nbytes].view(getattr(torch, spec.dtype))
        return torch.as_strided(flat, spec.shape, spec.stride, flat.storage_offset() + spec.offset)

    def pin(self, tensor: torch.Tensor) -> object:
        """None, told once, where the system does not allow it."""
        try:
            return pin(tensor, self.device)
        except LockingRefused as error:
            tell_of_refusal(0, tensor.nbytes, error)
            return None

    def displaces(self, nbytes: int) -> bool:
        """No: what a cold cache costs there was not measured."""
        del nbytes
        return False

    def op_seconds(self, ops: OpTable, op: int, *, cold: bool = False) -> float:
        """The time that the op keeps the current stream busy, or its launch if that takes longer."""
        del cold
        return median_seconds(lambda: ops.run(op), self.device)

    def workspace_bytes(self) -> int:
        """Measured. The calling thread's own workspaces are released; its next product takes them again."""
        return _measured_workspace(self.device)

    def release_workspaces(self) -> None:
        """Each is taken again at the next product that needs it, and by an engine before its next op."""
        torch._C._cuda_clearCublasWorkspaces()
        load_extension()
        torch.ops.disco_accel.release_unused_workspaces()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def streams(self, count: int) -> tuple[Any, ...]:
        return tuple(torch.cuda.Stream(self.device) for _ in range(count))

    @contextmanager
    def on_default_stream(self) -> Iterator[None]:
        with torch.cuda.stream(torch.cuda.default_stream(self.device)):
            yield
            torch.cuda.synchronize(self.device)

    def on_stream(self, stream: Any) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def delay(self, stream: Any, seconds: float) -> Callable[[], object]:
        cycles = _cycles(self.device, stream, seconds)
        return lambda: torch.cuda._sleep(cycles)

    def release_memory(self) -> None:
        torch.cuda.empty_cache()

    def loads(self, bandwidth: float | None) -> Load:
        del bandwidth
        return cuda_loads(self.device)

    def tensor_bytes(self) -> tuple[int, int]:
        counted = torch.cuda.memory_stats_as_nested_dict(self.device)
        if not counted:
            return 0, 0
        found = counted["allocated_bytes"]["all"]
        return int(found["current"]), int(found["peak"])

    def allocations(self) -> dict[str, int]:
        stats = torch.cuda.memory_stats(self.device)
        return {
            "from PyTorch's allocator": int(stats["allocation.all.allocated"]),
            "from the driver": int(stats["num_device_alloc"]),
        }

    def rng_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self.device)

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, self.device)

    def seed(self, seed: int) -> None:
        torch.cuda.default_generators[self.device.index].manual_seed(seed)

    def generator_kept(self) -> AbstractContextManager[object]:
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        return torch.random.fork_rng(devices=[index], device_type="cuda")


def _cycles(device: torch.device, stream: torch.cuda.Stream, wanted: float) -> int:
    """Cycles that take ``wanted`` seconds, measured."""
    with torch.cuda.device(device), torch.cuda.stream(stream):
        torch.cuda._sleep(_PROBE_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(_PROBE_CYCLES)
        end.record()
        end.synchronize()
    seconds = max(start.elapsed_time(end) * 1e-3, 1e-6)
    return min(int(_PROBE_CYCLES * wanted / seconds), _MOST_CYCLES)


def median_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median time that ``run`` keeps the device's current stream busy, or its launch if that takes longer."""
    with torch.cuda.device(device):
        samples: list[float] = []
        for _ in range(_TIMED_RUNS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(samples)


@functools.cache
def _measured_workspace(device: torch.device) -> int:
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


def pin(tensor: torch.Tensor, device: torch.device | None = None, *, read_only: bool = False) -> object:
    """Register the pages under a host tensor with CUDA, so that copies from and to it are asynchronous.

    ``device``: one that is used anyway, None for the current one; all devices may copy from the pages then. They stay
    registered as long as the returned object lives, which keeps the tensor too. ``read_only``: no device writes there,
    so that pages that are shared stay so.

    Raises:
        LockingRefused: the system does not allow so much; with CUDA's reason.
        ExecutionError: there is no CUDA, or the device cannot do that.
    """
    load_extension()
    try:
        with nullcontext() if device is None else torch.cuda.device(device):
            return torch.classes.disco_accel.Pinned(tensor, read_only)
    except (RuntimeError, ValueError) as error:
        kind = LockingRefused if _REFUSED.match(str(error)) else ExecutionError
        raise kind(f"pinning {tensor.nbytes} bytes of host memory failed: {error}") from error


def tell_of_refusal(locked: int, nbytes: int, error: ExecutionError) -> None:
    """Log, once in this process, that of ``nbytes`` bytes of host memory ``locked`` are page-locked."""
    if _refusals:
        return
    _refusals.append(error)
    logger.warning(
        "page-locked memory: %s of %s of host memory are locked, and no more can be: %s. Copies of the rest are right, "
        "but take longer and keep others waiting. Raise the limit of locked memory (ulimit -l; docker run --ulimit "
        "memlock=-1), raise memory= in .wslconfig on WSL, which locks a part of it at most, or free memory",
        format_size(locked),
        format_size(nbytes),
        error,
    )


@functools.cache
def peer_path(source: torch.device, target: torch.device) -> str:
    """One of ``PEER_PATHS``, tried at the first call for a pair of GPUs in this process."""
    load_extension()
    return PEER_PATHS[torch.ops.disco_accel.peer_path(str(source), str(target))]


@functools.cache
def _tell_of_peer_path(source: torch.device, target: torch.device) -> None:
    """Log, once for a pair of GPUs, that a driver changes bytes on the way or that copies go through host memory."""
    path = peer_path(source, target)
    if path == "wrong_bytes":
        logger.warning(
            "other bytes arrive at %s than a copy straight from %s has sent, so copies between them go through host "
            "memory; the driver or the machine's IOMMU is to blame, and other programs may compute with wrong bytes",
            target,
            source,
        )
    elif path == "no_access":
        logger.info("%s has no access to the memory of %s: copies between them go through host memory", source, target)


def unseen_gpus(root: Path = Path("/")) -> tuple[int, str]:
    """How many GPUs the driver has in a process in which PyTorch sees none, and PyTorch's reason."""
    folder = root / "proc/driver/nvidia/gpus"
    count = len(list(folder.glob("*"))) or len(list((root / "dev").glob("nvidia[0-9]*")))
    if torch.version.cuda is None:
        return count, f"PyTorch {torch.__version__} is a build without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return count, str(error).splitlines()[0]
    return count, "PyTorch gives no reason"


def _named(devices: Sequence[torch.device]) -> str:
    return ", ".join(map(str, devices)) or "none"


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
