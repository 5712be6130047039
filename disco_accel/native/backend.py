"""The kinds of devices that plans run on: one class for each, chosen once by ``backend_of``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from disco_accel.errors import ConfigError
from disco_accel.graph.taskgraph import TensorSpec
from disco_accel.native.cuda_backend import CudaBackend
from disco_accel.native.device_types import CUDA, DEVICE_TYPES, HOST
from disco_accel.native.engine_class import OpTable
from disco_accel.native.host_backend import HostBackend
from disco_accel.native.loads import Load
from disco_accel.simulate.roofline import Speed


class Backend(Protocol):
    """A device on which plans run. A new kind of device is a class like this in a file of its own, entered in
    ``_BACKENDS``; ``runtime_ext/torch/backend.h`` is its C++ side."""

    @property
    def device(self) -> torch.device:
        """The device; a GPU with its index, if it was given."""

    @property
    def separate_memory(self) -> bool:
        """Whether it has memory of its own, to which the host's is copied from page-locked pages."""

    @property
    def alignment(self) -> int:
        """Bytes of the allocations of PyTorch on it."""

    @property
    def copy_piece(self) -> int | None:
        """Bytes of the pieces in which copies to it are handed to the link; None: by the speed of a throttled link."""

    @property
    def rate_dtype(self) -> str:
        """The data type in which the kernels of fused optimizers take a learning rate."""

    @property
    def speed(self) -> Speed:
        """For estimates where no such device is there."""

    @property
    def switches(self) -> tuple[str, ...]:
        """Functions of ``torch._C`` that read a setting of its kernels, in the versions of PyTorch that have it."""

    @property
    def precisions(self) -> str:
        """How ``torch.backends`` calls its kernels where it sets their precision in float32."""

    @property
    def allocates_in_blocks(self) -> bool:
        """Whether tensors outside of plans take whole blocks of an allocator, so that budgets count those."""

    @property
    def needs_self_check(self) -> bool:
        """Whether its drivers and kernels are not part of this package and PyTorch, so that they are tried first."""

    @property
    def has_streams(self) -> bool:
        """Whether ops are put on streams, with which the caller's own work has to be ordered."""

    @property
    def has_cudnn(self) -> bool:
        """Whether PyTorch may take cuDNN's attention there."""

    def is_there(self) -> bool:
        """Whether this process can use such a device."""

    def count(self) -> int:
        """How many of this kind this process sees."""

    def current_index(self) -> int:
        """The index of PyTorch's current one of this kind."""

    def memory_bytes(self) -> int:
        """All memory of the device, or as much as this process may use of it."""

    def free_bytes(self) -> int:
        """The part of ``memory_bytes`` that nobody uses now."""

    def facts(self) -> dict[str, Any]:
        """Kind, name, memory in bytes and further facts for ``doctor``."""

    def resolve(self) -> torch.device:
        """``device`` as of now, a GPU with its index in any case. Raises ConfigError if it is not there."""

    def others(self, indices: Sequence[int], count: int) -> list[torch.device]:
        """The ``count`` devices of a plan, this one first. ``indices``: of GPUs, in the plan's order, of which a plan
        of fewer devices takes the first; none: this one. Raises ConfigError where these are too few, or cannot run one
        plan together."""

    def copies_straight(self, devices: Sequence[torch.device]) -> bool:
        """Whether bytes get from each of ``devices`` to each other without the host."""

    def hardware(self) -> str:
        """Its model, for keys of caches."""

    def target(self) -> dict[str, Any] | None:
        """The device, for a compiler of kernels in another process; None: that process's own host."""

    def identity(self) -> dict[str, str]:
        """The device, its driver and its allocator, by name: a self-check's answer holds for these."""

    def prepare(self) -> None:
        """Make ops on it recordable and plannable. Raises ExtensionError when a library for that cannot be built."""

    def current(self) -> AbstractContextManager[object]:
        """It is PyTorch's current device inside."""

    def arena(self, nbytes: int) -> torch.Tensor:
        """One arena of exactly ``nbytes`` bytes, 1-d uint8. Raises RuntimeError when the memory is not there."""

    def is_arena(self, tensor: torch.Tensor) -> bool:
        """Whether ops may be made to allocate in ``tensor``: PyTorch must not free the tensors in it one by one."""

    def touched_bytes(self, arena: torch.Tensor) -> int:
        """Bytes of ``arena`` that physical memory is behind."""

    def alias(self, arena: torch.Tensor, offset: int, nbytes: int, spec: TensorSpec) -> torch.Tensor:
        """A tensor laid out as ``spec`` over bytes ``offset`` to ``offset + nbytes`` of ``arena``, kept alive by it."""

    def pin(self, tensor: torch.Tensor) -> object:
        """Page-lock a host tensor while the returned object lives; None where copies gain nothing by it. Raises
        ExecutionError with the system's reason."""

    def displaces(self, nbytes: int) -> bool:
        """Whether a step that goes through ``nbytes`` drives each kernel's code and data out of the caches before that
        kernel runs again, as far as seconds are measured with that."""

    def op_seconds(self, ops: OpTable, op: int, *, cold: bool = False) -> float:
        """Median time of op number ``op`` of the engine's op table ``ops``, over a few runs. ``cold``: each run finds
        the caches as in a step that displaces."""

    def workspace_bytes(self) -> int:
        """Bytes that matrix products take on each stream of each thread, outside of any plan."""

    def release_workspaces(self) -> None:
        """Give the workspaces of all threads and streams back, the engine's included."""

    def synchronize(self) -> None:
        """Wait for all work on the device."""

    def streams(self, count: int) -> tuple[Any, ...]:
        """New streams; None in the place of each where there are none."""

    def on_default_stream(self) -> AbstractContextManager[object]:
        """Inside, work goes to the device's default stream, whatever the caller's is; it is over at the end."""

    def on_stream(self, stream: Any) -> AbstractContextManager[object]:
        """Inside, this one of ``streams`` is the current one."""

    def delay(self, stream: Any, seconds: float) -> Callable[[], object]:
        """A function that keeps the current stream busy for about so long, measured on ``stream``; where there are no
        streams it does nothing."""

    def release_memory(self) -> None:
        """Give memory back that the process has freed and PyTorch's allocator has kept."""

    def loads(self, bandwidth: float | None) -> Load:
        """A queue of copies to the device, beside its own work. ``bandwidth``: of the host device's throttled link, in
        bytes/s."""

    def tensor_bytes(self) -> tuple[int, int]:
        """Bytes of this process's tensors on the device now, and at most until now; zeros where nobody counts them."""

    def allocations(self) -> dict[str, int]:
        """How many blocks of the device's memory this process has taken until now, by where they came from."""

    def rng_state(self) -> torch.Tensor:
        """The state of the generator that ops on the device draw from."""

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Set it to a state that ``rng_state`` returned."""

    def seed(self, seed: int) -> None:
        """Seed it, and no other generator."""

    def generator_kept(self) -> AbstractContextManager[object]:
        """It is put back at the end to where it was at the begin; so is the host's."""


_BACKENDS: Mapping[str, Callable[[torch.device], Backend]] = {HOST.name: HostBackend, CUDA.name: CudaBackend}
assert _BACKENDS.keys() == DEVICE_TYPES.keys()


@functools.cache
def backend_of(device: torch.device) -> Backend:
    """The backend of ``device``. Raises ConfigError for a kind that there is none for."""
    make = _BACKENDS.get(device.type)
    if make is None:
        raise ConfigError(f"device: {device} is not supported; use {' or '.join(_BACKENDS)}")
    return make(device)


def backend_of_kind(kind: str, index: int | None = None) -> Backend:
    """The backend of the device of this ``kind`` and ``index``; None: PyTorch's current one."""
    return backend_of(torch.device(kind) if index is None else torch.device(kind, index))


def first_accelerator(index: int | None = None) -> Backend | None:
    """The backend of the first kind of devices with memory of their own that are there; None without any."""
    found = (backend_of_kind(kind.name, index) for kind in DEVICE_TYPES.values() if kind.separate_memory)
    return next((backend for backend in found if backend.is_there()), None)


def has_backend(device: torch.device) -> bool:
    """Whether ``device`` is of a kind that plans run on."""
    return device.type in _BACKENDS


def is_host(device: torch.device) -> bool:
    """Whether tensors of ``device``, which may be one that no plan runs on, lie in host memory."""
    return device.type == HOST.name


def run_device(name: str) -> torch.device:
    """The device that ``name`` (cpu, cuda, cuda:1) means now; of a GPU the index is always given. Raises ConfigError
    when it is another kind of device or not there."""
    return backend_of(torch.device(name)).resolve()


def prepare_device(device: torch.device) -> None:
    """``Backend.prepare`` of ``device``."""
    backend_of(device).prepare()


def workspace_bytes(device: torch.device) -> int:
    """``Backend.workspace_bytes`` of ``device``."""
    return backend_of(device).workspace_bytes()


def release_workspaces(device: torch.device) -> None:
    """``Backend.release_workspaces`` of ``device``."""
    backend_of(device).release_workspaces()
