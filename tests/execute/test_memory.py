"""Arenas, the host memory of weights, and the counting of allocations."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save

from disco_accel.errors import ExecutionError
from disco_accel.graph.taskgraph import TensorSpec
from disco_accel.native.arena import alias, host_arena, touched_bytes
from disco_accel.native.extension import load_extension
from disco_accel.native.host_memory import ALIGNMENT, HostMemory, bytes_of
from tests.support import malloc_watch


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=1500, env={**os.environ, **environment}
    )


@pytest.mark.parametrize("offset", [-1, 8192])
def test_an_access_outside_the_arena_faults(offset: int) -> None:
    """Guard pages: the bytes right before an arena of whole pages and right after it are not mapped."""
    done = _run(
        "import ctypes; from disco_accel.native.arena import host_arena\n"
        "arena = host_arena(8192); ctypes.memset(arena.data_ptr(), 1, 8192); print('inside ok', flush=True)\n"
        f"ctypes.memset(arena.data_ptr() + {offset}, 1, 1); print('survived')"
    )
    assert done.stdout == "inside ok\n" and done.returncode == -11


def test_an_arena_is_untouched_until_used() -> None:
    """Pages count once they were written."""
    arena = host_arena(1 << 24)
    assert touched_bytes(arena) == 0
    arena[: 1 << 20] = 1
    assert 1 << 20 <= touched_bytes(arena) < 1 << 21
    assert arena.data_ptr() % 256 == 0
    assert touched_bytes(host_arena(0)) == 0


def test_an_alias_has_a_storage_of_its_own_and_keeps_the_arena() -> None:
    """Its storage has its own size, writes reach the arena, and it outlives the arena's tensor."""
    arena = host_arena(4096)
    made = alias(arena, 256, 64, TensorSpec("float32", (2, 4), (1, 2), 4))
    assert made.untyped_storage().nbytes() == 64 and made.storage_offset() == 4
    made.fill_(3.0)
    assert arena[256:320].view(torch.float32).tolist() == [0.0] * 4 + [3.0] * 8 + [0.0] * 4
    del arena
    assert made.sum().item() == 24.0
    with pytest.raises(ValueError, match="outside an arena of 4096"):
        alias(host_arena(4096), 4090, 64, TensorSpec("float32", (16,), (1,)))


def test_adopted_tensors_keep_bits_layout_and_save_alone() -> None:
    """Values, strides and dtype stay; each has its own aligned storage; saving one saves its bytes only."""
    tensors = [torch.randn(5, 7), torch.randn(6, 4, dtype=torch.bfloat16).t(), torch.tensor(3), torch.empty(0)]
    memory = HostMemory(HostMemory.room_for(tensors))
    adopted = [memory.adopt(t) for t in tensors]
    for old, new in zip(tensors, adopted, strict=True):
        assert torch.equal(old, new) and old.stride() == new.stride() and old.dtype == new.dtype
        assert new.numel() == 0 or new.data_ptr() % ALIGNMENT == 0
        assert new.untyped_storage().nbytes() == old.numel() * old.element_size()
    assert len(save({"w": adopted[0]})) < 5 * 7 * 4 + 200
    parameter = torch.nn.Parameter(tensors[0].clone(), requires_grad=False)
    parameter.data = adopted[0]
    assert bytes_of(parameter).data_ptr() == adopted[0].data_ptr() and bytes_of(parameter).numel() == 140
    assert memory.used <= memory.nbytes
    with pytest.raises(ExecutionError, match="left, a tensor needs 40000"):
        memory.adopt(torch.zeros(10000))
    with pytest.raises(ExecutionError, match="meta"):
        memory.adopt(torch.empty(4, device="meta"))


def test_bytes_of_follows_offset_and_strides() -> None:
    """A view's bytes begin at its first element and end at its last."""
    base = torch.arange(12, dtype=torch.int32)
    part = bytes_of(base[2:10:3])
    assert part.view(torch.int32).tolist() == [2, 3, 4, 5, 6, 7, 8]


def test_live_tracking_finds_the_peak_of_an_eager_computation() -> None:
    """Peak and live bytes follow allocations and frees."""
    load_extension()
    ops = torch.ops.disco_accel
    ops.set_live_tracking(True)
    try:
        a = torch.empty(1 << 20, dtype=torch.uint8)
        b = torch.empty(1 << 20, dtype=torch.uint8)
        assert ops.live_bytes() == 2 << 20
        del b
        assert (ops.live_bytes(), ops.peak_live_bytes()) == (1 << 20, 2 << 20)
        ops.reset_peak_live_bytes()
        assert ops.peak_live_bytes() == 1 << 20
        del a
        assert ops.live_bytes() == 0
    finally:
        ops.set_live_tracking(False)


def test_onednn_scratch_goes_through_the_decorator() -> None:
    """oneDNN frees with raw_deallocate: convolution and bf16 matmul still work with the decorator in place."""
    load_extension()
    torch.ops.disco_accel.set_live_tracking(True)
    try:
        x, w = torch.randn(1, 3, 16, 16), torch.randn(4, 3, 3, 3)
        once = torch.nn.functional.conv2d(x, w)
        assert torch.equal(once, torch.nn.functional.conv2d(x, w))
        half = torch.randn(64, 64, dtype=torch.bfloat16)
        assert torch.equal(half @ half, half @ half)
        del once, x, w, half
        assert torch.ops.disco_accel.live_bytes() >= 0
    finally:
        torch.ops.disco_accel.set_live_tracking(False)


_WATCHED = """
import torch
from tests.support import malloc_watch
from tests.execute import samples
from tests.execute.programs import build, executor_of, step

def greedy(b, g):
    b.call("topk", b.input(torch.randn(4096, generator=g)), 8, keep="top")

def counted(executor, inputs):
    malloc_watch.reset()
    step(executor, inputs)
    # On some CPUs the library below ATen's product takes memory to pack its operands, in eager mode as well.
    packing = [line for line in malloc_watch.describe(limit=1 << 20) if "structured_mm_out_cpu::impl" in line]
    return malloc_watch.count() - len(packing)

def steady(program):
    # Which thread runs a kernel is a matter of chance, and the first time it may take memory for good.
    executor = executor_of(build(program))
    counts = []
    while len(counts) < 60 and (len(counts) < 3 or len({*counts[-3:]}) > 1):
        counts.append(counted(executor, build(program, len(counts))))
    return max(counts[-3:])

assert malloc_watch.active()
for program in samples.ALL:
    assert steady(program) == 0, (program.__name__, malloc_watch.describe())
assert steady(greedy) == 1 and "disco::OpTable::run" in malloc_watch.describe()[0]
print("watched")
"""


_WATCHED_TEAM = """
import torch
from tests.support import malloc_watch
from disco_accel.execute.executor import EngineOptions
from tests.execute import samples
from tests.execute.programs import build, executor_of, step_in_two

def parallel(b, g):
    x = b.input(torch.randn(1 << 18, generator=g))
    b.call("silu", x, keep="y")
    b.call("sum", x, keep="total")
    b.call("mm", x.view(lambda t: t.view(512, 512)), x.view(lambda t: t.view(512, 512)), keep="product")

torch.set_num_threads(2)
before = malloc_watch.threads()
executor = executor_of(build(parallel), options=EngineOptions(compute_threads=2))
quiet = 0
for seed in range(200):
    # Which thread runs a kernel is a matter of chance, and one that never ran a product before takes memory for it.
    inputs = build(parallel, seed)
    malloc_watch.reset()
    step_in_two(executor, inputs)
    quiet = 0 if malloc_watch.count() else quiet + 1
    if quiet >= 3 and malloc_watch.threads() - before == 4:
        break
assert quiet >= 3, malloc_watch.describe()
print(malloc_watch.threads() - before)
"""


def test_openmp_workers_are_watched_too() -> None:
    """With two intra-op threads, the teams of the engine's thread and of a caller that runs kernels are watched."""
    done = _run(_WATCHED_TEAM, LD_PRELOAD=str(malloc_watch.library()), OMP_NUM_THREADS="2")
    assert done.stdout == "4\n", done.stderr[-2000:]


def test_a_steady_step_makes_no_large_allocation() -> None:
    """No malloc, posix_memalign or mmap of 4 KiB or more on the engine's thread; an op known to make one is caught.

    Not counted: what a BLAS takes to pack its operands, which depends on the CPU."""
    done = _run(_WATCHED, LD_PRELOAD=str(malloc_watch.library()))
    assert done.stdout == "watched\n", done.stderr[-2000:]
