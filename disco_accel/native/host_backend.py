"""The host as a device: ops run on threads of this process, arenas are mappings of its memory."""

from __future__ import annotations

import functools
import platform
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from disco_accel.errors import ConfigError
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.graph.taskgraph import TensorSpec
from disco_accel.host_limits import host_limits, require_left
from disco_accel.native.device_types import HOST
from disco_accel.native.engine_class import OpTable
from disco_accel.native.extension import load_extension
from disco_accel.native.loads import Load, host_loads
from disco_accel.simulate.machine import Link, Machine
from disco_accel.simulate.roofline import Speed
from disco_accel.sizes import parse_size

_ENOUGH_SECONDS = 0.1
_SHORT_SECONDS = 1e-3
_SHORT_RUNS = 15
"""Ops of a few microseconds are run so often: one run in five is disturbed on a busy machine."""


_USUAL_CORE_CACHE = 2 << 20

_ONE_CORE = Speed(
    name="one CPU core, its link a copy in memory",
    half=3e10,
    single=6e10,
    memory=1e10,
    kernel=2e-6,
    machine=Machine(links={TO_DEVICE: Link(4e9, 0), TO_HOST: Link(4e9, 0)}),
)
"""With AVX2."""


def host_arena(nbytes: int) -> torch.Tensor:
    """``nbytes`` bytes of anonymous host memory between guard pages, as a 1-d uint8 tensor.

    Its pages are untouched until used. Raises RuntimeError when the memory is not there.
    """
    load_extension()
    arena: torch.Tensor = torch.ops.disco_accel.map_arena(nbytes)
    return arena


@dataclass(frozen=True, slots=True)
class HostBackend:
    """The CPU; see ``Backend``."""

    device: torch.device
    separate_memory = HOST.separate_memory
    alignment = 64
    copy_piece = None
    rate_dtype = "float64"
    speed = _ONE_CORE
    switches = (
        *("_get_mkldnn_enabled", "_get_mkldnn_deterministic", "_get_nnpack_enabled"),
        "_get_cpu_allow_fp16_reduced_precision_reduction",
    )
    precisions = "mkldnn"
    allocates_in_blocks = False
    needs_self_check = False
    has_streams = False
    has_cudnn = False

    def is_there(self) -> bool:
        return True

    def count(self) -> int:
        return 1

    def current_index(self) -> int:
        return 0

    def memory_bytes(self) -> int:
        return min(limit.total for limit in host_limits())

    def free_bytes(self) -> int:
        return min(limit.left for limit in host_limits())

    def facts(self) -> dict[str, Any]:
        return {"kind": HOST.name, "name": _processor(), "memory": self.memory_bytes()}

    def resolve(self) -> torch.device:
        return torch.device("cpu")

    def others(self, indices: Sequence[int], count: int) -> list[torch.device]:
        if indices:
            raise ConfigError(
                f"devices: {tuple(indices)} are indices of GPUs, the plan runs on the cpu; leave them out"
            )
        return [torch.device("cpu")] * count

    def copies_straight(self, devices: Sequence[torch.device]) -> bool:
        del devices
        return True

    def hardware(self) -> str:
        return platform.machine()

    def target(self) -> dict[str, Any] | None:
        return None

    def identity(self) -> dict[str, str]:
        return {"device": f"cpu {platform.processor() or platform.machine()}"}

    def prepare(self) -> None:
        load_extension()

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def arena(self, nbytes: int) -> torch.Tensor:
        require_left(nbytes, "the plan's memory")
        return host_arena(nbytes)

    def is_arena(self, tensor: torch.Tensor) -> bool:
        load_extension()
        return tensor.numel() == 0 or bool(torch.ops.disco_accel.is_arena(tensor))

    def touched_bytes(self, arena: torch.Tensor) -> int:
        return int(torch.ops.disco_accel.touched_bytes(arena))

    def alias(self, arena: torch.Tensor, offset: int, nbytes: int, spec: TensorSpec) -> torch.Tensor:
        """With a storage of its own of exactly ``nbytes`` bytes, so that saving it does not save the arena."""
        storage = torch.ops.disco_accel.carve(arena, offset, nbytes).untyped_storage()
        return torch.empty(0, dtype=getattr(torch, spec.dtype), device="cpu").set_(
            storage, spec.offset, spec.shape, spec.stride
        )

    def pin(self, tensor: torch.Tensor) -> object:
        del tensor
        return None

    def displaces(self, nbytes: int) -> bool:
        return nbytes > _core_cache_bytes()

    def op_seconds(self, ops: OpTable, op: int, *, cold: bool = False) -> float:
        others = _others(2 * _core_cache_bytes() * torch.get_num_threads()) if cold else None

        def run() -> list[float]:
            if others is not None:
                others.add_(1)
            return ops.time(op, 1)

        samples = run()
        while len(samples) < 5 and sum(samples) < _ENOUGH_SECONDS:
            samples += run()
        while sum(samples) < _SHORT_SECONDS and len(samples) < _SHORT_RUNS:
            samples += run()
        return statistics.median(samples)

    def workspace_bytes(self) -> int:
        return 0

    def release_workspaces(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def streams(self, count: int) -> tuple[Any, ...]:
        return (None,) * count

    def on_default_stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def on_stream(self, stream: Any) -> AbstractContextManager[object]:
        del stream
        return nullcontext()

    def delay(self, stream: Any, seconds: float) -> Callable[[], object]:
        del stream, seconds
        return lambda: None

    def release_memory(self) -> None:
        _others.cache_clear()

    def loads(self, bandwidth: float | None) -> Load:
        return host_loads(bandwidth)

    def tensor_bytes(self) -> tuple[int, int]:
        return 0, 0

    def allocations(self) -> dict[str, int]:
        return {}

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def generator_kept(self) -> AbstractContextManager[object]:
        return torch.random.fork_rng(devices=[])


@functools.lru_cache(maxsize=1)
def _others(nbytes: int) -> torch.Tensor:
    """Stands for what other kernels of a step read and write between two runs of one; each thread goes through a part
    of it."""
    return torch.zeros(nbytes // 8, dtype=torch.int64)


@functools.cache
def _core_cache_bytes() -> int:
    """Of the largest cache that a core has for itself, or a usual size."""
    for cache in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            if (cache / "level").read_text().strip() == "2":
                return parse_size((cache / "size").read_text().strip())
        except (OSError, ConfigError):
            continue
    return _USUAL_CORE_CACHE


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
