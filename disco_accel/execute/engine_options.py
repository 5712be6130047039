"""How the engine runs a plan: the options, and the numbers that it is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from disco_accel.errors import ConfigError
from disco_accel.native.backend import backend_of, run_device
from disco_accel.native.device_types import DEVICE_TYPES
from disco_accel.native.engine_numbers import DISPATCHES, OPTIONS

PIECE_SECONDS = 1e-3
"""How long a piece takes on a throttled link of the host device."""


@dataclass(frozen=True, slots=True)
class HostLink:
    """The links of one host device: bytes per second and direction (None = as fast as memcpy), seconds per copy."""

    bandwidth: float | None = None
    latency: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the engine runs a plan. The results never depend on it, only their timing."""

    device: str = "cpu"
    """``cpu`` (host device) or ``cuda``."""
    devices: tuple[int, ...] = ()
    """CUDA only: the GPU, by index, that each device of the plan is, in the plan's order and without those that lie in
    host memory; a plan of fewer devices takes the first. The first is ``device``, which alone it is if none is
    given."""
    lookahead: int = 2
    """Kernels queued on a stream beyond the running one; 0 launches after completion, as in the paper."""
    copy_piece: int | None = None
    """Bytes of the pieces in which a copy from or to the host is handed to its lane; 0 = copies are not cut. Behind
    each piece the first ready copy goes on. None: 16 MiB on a GPU, a millisecond's bytes on a throttled link of the
    host device, 0 on an unthrottled one."""
    launch_graphs: bool = True
    """CUDA only: kernels that follow each other on a stream are recorded in the second step that runs them, and
    launched as one from then on. Not with ``lookahead`` 0, several compute streams, or an order that is fixed."""
    graph_bytes: int = 64 << 20
    """Of each GPU, that graphs of all engines with the same arena may take."""
    dispatch: str = "priority"
    """``priority``, ``random``, ``fixed``, or ``synchronous`` (one vertex at a time in serial order)."""
    seed: int = 0
    """Of random dispatch."""
    link_bandwidth: float | None = None
    """Bytes per second and direction, host device only; None = as fast as memcpy."""
    link_latency: float = 0.0
    """Seconds per copy, host device only."""
    links: tuple[HostLink, ...] = ()
    """Host device only: the links of each device in the plan's order, in place of the two figures above. Devices of the
    plan that lie in host memory have none: a copy from or to them takes its other device's."""
    link_jitter: float = 0.0
    """Host device only: each copy's time is multiplied by a random factor from 1 - link_jitter to 1 + link_jitter."""
    link_jitter_seed: int = 0
    """Equal seeds disturb the same copies in the same way, in any order."""
    compute_threads: int | None = None
    """Intra-op threads of a compute stream; None = torch.get_num_threads()."""
    host_threads: int | None = None
    """Intra-op threads of a device of the plan that lies in host memory, whose kernels run beside those of the other
    devices; None = torch.get_num_threads(). They share the processors with ``compute_threads``, or with the thread that
    launches on a GPU: ``threads_beside`` is a number that leaves those theirs."""
    compute_streams: int = 1
    inline_compute: bool = True
    """One compute stream on the only host device: its ops run on the engine's loop thread, without a hand-off."""
    stall_timeout: float = 120.0
    """Seconds without any progress after which a step counts as stalled."""
    time_ops: bool = False
    """Measure op_seconds and engine_seconds also when not tracing."""


DEFAULT_OPTIONS = EngineOptions()
_FREE_ORDERS = ("priority", "random")


def first_device(options: EngineOptions) -> torch.device:
    """The first device of a plan that does not lie in host memory. Raises ConfigError where it is not there."""
    device = torch.device(options.device)
    indexed = options.devices and device.index is None and backend_of(device).separate_memory
    return run_device(f"{device.type}:{options.devices[0]}" if indexed else options.device)


def makes_graphs(options: EngineOptions) -> bool:
    """Whether kernels are launched as graphs, if the device can."""
    able = DEVICE_TYPES[torch.device(options.device).type].separate_memory and options.launch_graphs
    return able and options.lookahead > 0 and options.compute_streams == 1 and options.dispatch in _FREE_ORDERS


def threads_beside(device: str, compute_threads: int | None) -> int:
    """``host_threads`` that leave ``compute_threads`` of PyTorch's threads to the kernels of the host device, or one to
    the thread that launches on a GPU. Where nobody has said how many the kernels have, both have all."""
    taken = 1 if DEVICE_TYPES[device].separate_memory else compute_threads or 0
    return max(1, torch.get_num_threads() - taken)


def engine_settings(options: EngineOptions) -> dict[str, float]:
    """The options as the numbers that the engine reads. Raises ConfigError naming the option."""
    if options.dispatch not in DISPATCHES:
        raise ConfigError(f"dispatch is '{options.dispatch}', but it is one of {', '.join(DISPATCHES)}")
    for name in ("lookahead", "seed", "link_latency", "link_jitter_seed", "copy_piece", "graph_bytes"):
        if (getattr(options, name) or 0) < 0:
            raise ConfigError(f"{name} is {getattr(options, name)}, but it cannot be negative")
    if options.link_bandwidth is not None and options.link_bandwidth <= 0:
        raise ConfigError(f"link_bandwidth is {options.link_bandwidth}, but it is bytes per second above 0, or None")
    if not 0 <= options.link_jitter < 1:
        raise ConfigError(f"link_jitter is {options.link_jitter}, but it is at least 0 and less than 1")
    if not options.stall_timeout > 0:
        raise ConfigError(f"stall_timeout is {options.stall_timeout}, but it is seconds above 0")
    threads = torch.get_num_threads() if options.compute_threads is None else options.compute_threads
    host_threads = torch.get_num_threads() if options.host_threads is None else options.host_threads
    if threads < 1 or host_threads < 1 or options.compute_streams < 1:
        raise ConfigError("compute_threads, host_threads and compute_streams are at least 1")
    computed = {
        "dispatch": DISPATCHES.index(options.dispatch),
        "copy_piece": copy_piece(options),
        "compute_threads": threads,
        "host_threads": host_threads,
    }
    return {name: float(computed.get(name, getattr(options, name))) for name in OPTIONS}


def copy_piece(options: EngineOptions) -> int:
    """Bytes of a piece of a copy, 0 if copies are not cut. Raises ConfigError for a link that cannot be."""
    if options.copy_piece is not None:
        return options.copy_piece
    piece = backend_of(torch.device(options.device)).copy_piece
    if piece is not None:
        return piece
    bandwidths = [link.bandwidth for link in options.links] or [options.link_bandwidth]
    slowest = min((bandwidth for bandwidth in bandwidths if bandwidth is not None), default=None)
    return 0 if slowest is None else max(1, int(slowest * PIECE_SECONDS))


def engine_links(options: EngineOptions, devices: int) -> list[float]:
    """Bandwidth (0 = unlimited) and latency of each device's links, one after the other. Raises ConfigError."""
    links: Sequence[HostLink] = options.links or [HostLink(options.link_bandwidth, options.link_latency)] * devices
    if len(links) != devices:
        raise ConfigError(f"links has {len(links)} entries, the plan has {devices} devices")
    for link in links:
        if (link.bandwidth is not None and link.bandwidth <= 0) or link.latency < 0:
            raise ConfigError(f"links: {link} is not a bandwidth above 0 (or None) and a latency of at least 0")
    return [number for link in links for number in (link.bandwidth or 0.0, link.latency)]
