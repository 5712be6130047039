"""Arenas of host memory are laid out for locking in pieces, and near their GPU."""

from __future__ import annotations

import mmap
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disco_accel.errors import ExecutionError
from disco_accel.native import host_memory, numa
from disco_accel.native.arena import host_arena
from disco_accel.native.host_memory import HostMemory

PIECE = 1 << 16


@pytest.mark.parametrize("sizes", [[30_000] * 9, [1000, 200_000, 1000, 70_000], [PIECE, PIECE, 64, PIECE - 64], [500]])
def test_no_tensor_lies_on_both_sides_of_a_cut(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_MOST_LOCKED_AT_ONCE", PIECE)
    given = [torch.full((size,), i + 1, dtype=torch.uint8) for i, size in enumerate(sizes)]
    memory = HostMemory(HostMemory.room_for(given))
    placed = [memory.adopt(tensor) for tensor in given]
    assert all(map(torch.equal, placed, given))
    begin = placed[0].data_ptr()
    bounds = [0, *memory._cuts, memory.nbytes]
    assert all((begin + cut) % mmap.PAGESIZE == 0 for cut in memory._cuts)
    for tensor in placed:
        at = tensor.data_ptr() - begin
        (piece,) = (i for i, (low, high) in enumerate(pairwise(bounds)) if low <= at < high)
        assert at + tensor.nbytes <= bounds[piece + 1]
        assert bounds[piece + 1] - bounds[piece] <= PIECE + 2 * mmap.PAGESIZE * len(sizes) or tensor.nbytes > PIECE
    assert bool(memory._cuts) == (sum(sizes) > PIECE)


def test_an_arena_larger_than_what_is_left_is_refused() -> None:
    with pytest.raises(ExecutionError, match="an arena for weights or gradients would take 4096TiB of host "):
        HostMemory(4 << 50)


def machine(root: Path, nodes: int, node: str | None) -> Path:
    for i in range(nodes):
        (root / f"sys/devices/system/node/node{i}").mkdir(parents=True)
    folder = root / "sys/bus/pci/devices/0001:3a:00.0"
    folder.mkdir(parents=True)
    if node is not None:
        (folder / "numa_node").write_text(node)
    return root


@pytest.mark.parametrize(
    ("nodes", "written", "found"),
    [
        (2, "1\n", 1),
        (2, "0\n", 0),
        (1, "0\n", None),
        (2, "-1\n", None),
        (2, "no\n", None),
        (2, None, None),
        (0, "1", None),
    ],
)
def test_the_node_of_a_gpu(
    nodes: int, written: str | None, found: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3A, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    root = machine(tmp_path, nodes, written)
    gpu = torch.device("cuda", 0)
    assert numa.node_of(gpu, root) == found
    # Node 0 is there everywhere.
    arena = host_arena(1 << 16)
    assert numa.prefer_node_of(gpu, arena, root) == (found == 0)
    assert not numa.prefer_node_of(torch.device("cpu"), arena, root)
    arena.fill_(1)


def test_the_kernel_prefers_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3A, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    arena: Any = host_arena(1 << 16)
    if not numa.prefer_node_of(torch.device("cuda", 0), arena, machine(tmp_path, 2, "0")):
        pytest.skip("this kernel takes no memory policy")
    arena.fill_(1)
    start = f"{arena.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE:08x} "
    (line,) = (line for line in Path("/proc/self/numa_maps").read_text().splitlines() if line.startswith(start))
    assert "prefer" in line
