"""NUMA nodes: host memory near the GPU that copies from it. Copies across sockets reach half of the link or less."""

from __future__ import annotations

import ctypes
import mmap
import platform
from pathlib import Path

import torch

from disco_accel.host_limits import numbers_in, status_of_process

_MBIND = {"x86_64": 237, "aarch64": 235}
"""Linux, the number of mbind(2), for which the C library has no function."""
_PREFERRED = 1
_ROOT = Path("/")


def node_count(root: Path = _ROOT) -> int:
    """NUMA nodes of this machine; 1 where the system does not tell."""
    return max(1, len(list((root / "sys/devices/system/node").glob("node[0-9]*"))))


def node_of(device: torch.device, root: Path = _ROOT) -> int | None:
    """The node that the GPU ``device`` is attached to; None where there is one node, or nobody tells."""
    if node_count(root) < 2:
        return None
    properties = torch.cuda.get_device_properties(device)
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in parts:
        return None
    domain, bus, slot = parts
    try:
        node = int((root / f"sys/bus/pci/devices/{domain:04x}:{bus:02x}:{slot:02x}.0/numa_node").read_text())
    except (OSError, ValueError):
        return None
    # -1: the firmware does not say.
    return node if node >= 0 else None


def within_reach(node: int, root: Path = _ROOT) -> tuple[bool | None, bool | None]:
    """Whether this process may run on a processor of ``node``, and whether it may take memory there; None where the
    system does not tell."""
    status = status_of_process(root)
    try:
        processors = numbers_in((root / f"sys/devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        processors = set()
    mine, nodes = (numbers_in(status.get(f"{what}_allowed_list", "")) for what in ("Cpus", "Mems"))
    runs = not mine.isdisjoint(processors) if mine and processors else None
    return runs, str(node) in nodes if nodes else None


def prefer_node_of(device: torch.device, arena: torch.Tensor, root: Path = _ROOT) -> bool:
    """Have pages of ``arena``, none of which is in memory yet, come from the node of the GPU ``device`` as long as it
    has some; whether the kernel takes that on. Nothing is lost where it does not, as in some containers."""
    number = _MBIND.get(platform.machine())
    node = node_of(device, root) if device.type == "cuda" and arena.numel() else None
    if node is None or number is None:
        return False
    begin = arena.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    nbytes = arena.data_ptr() + arena.numel() - begin
    nodes = (ctypes.c_ulong * (node // 64 + 1))()
    nodes[node // 64] = 1 << node % 64
    # The kernel takes one bit less than it is told.
    bits = 64 * len(nodes) + 1
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    long = ctypes.c_ulong
    return bool(call(long(number), long(begin), long(nbytes), long(_PREFERRED), nodes, long(bits), long(0)) == 0)
