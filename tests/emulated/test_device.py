"""The emulation itself: each thing that it watches is done wrong here once, and it says so."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from disco_accel.native.cuda_driver import CudaMapping, create_mapping, granularity
from disco_accel.store.cuda_objects import _Exposed
from tests.emulated import device

N = 1 << 16
CUDA = torch.device("cuda", 0)
RUNTIME = ctypes.CDLL(None)
OUT_OF_MEMORY = 2
ALL_ONES = -1
"""Every integer of memory that nothing has written."""


def pinned() -> torch.Tensor:
    return torch.arange(N, dtype=torch.int64).pin_memory()


def test_a_product_and_a_sum_have_the_hosts_bits() -> None:
    a, b = torch.randn(64, 32), torch.randn(32, 16)
    assert torch.equal((a.to(CUDA) @ b.to(CUDA)).cpu(), a @ b)
    assert torch.equal(a.to(CUDA).softmax(-1).sum(0).cpu(), a.softmax(-1).sum(0))


def test_the_host_cannot_read_device_memory() -> None:
    """In a process of its own, which ends as on a machine with a GPU."""
    program = "import ctypes, torch; ctypes.string_at(torch.ones(8, device='cuda').data_ptr(), 8)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGSEGV


def test_fresh_device_memory_holds_nothing_of_use() -> None:
    torch.cuda.empty_cache()
    assert torch.empty(N, device=CUDA).isnan().all()


def test_a_stream_that_waits_for_none_is_a_race() -> None:
    value, side = torch.zeros(N, device=CUDA), torch.cuda.Stream()
    with device.expect_complaints("RACE"), torch.cuda.stream(side):
        value.add_(1)


def test_a_stream_that_waits_is_none() -> None:
    value, side = torch.zeros(N, device=CUDA), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        value.add_(1)
    torch.cuda.current_stream().wait_stream(side)
    value.add_(1)
    assert value.eq(2).all() and not device.complaints()


def test_an_event_orders_what_came_before_its_record_alone() -> None:
    value, side, event = torch.zeros(N, device=CUDA), torch.cuda.Stream(), torch.cuda.Event()
    event.record()
    value.add_(1)
    side.wait_event(event)
    with device.expect_complaints("RACE"), torch.cuda.stream(side):
        value.add_(1)


def test_the_host_orders_streams_that_it_has_waited_for() -> None:
    value, side = torch.zeros(N, device=CUDA), torch.cuda.Stream()
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(side):
        value.add_(1)
    torch.cuda.synchronize()
    assert not device.complaints()


def test_a_result_that_is_read_before_its_copy_is_never_right() -> None:
    there, here = torch.arange(N, device=CUDA), pinned()
    torch.cuda.synchronize()
    device.hang()
    here.copy_(there, non_blocking=True)
    early = here.clone()
    device.release()
    torch.cuda.synchronize()
    assert early.eq(ALL_ONES).all() and here.equal(there.cpu())


def test_a_source_that_changes_while_its_copy_waits_is_told() -> None:
    here, there = pinned(), torch.empty(N, dtype=torch.int64, device=CUDA)
    device.hang()
    there.copy_(here, non_blocking=True)
    here.zero_()
    device.release()
    with device.expect_complaints("the host changed 524288 pinned bytes while a copy out of them was queued"):
        pass


def test_a_target_that_the_host_writes_while_its_copy_waits_is_told() -> None:
    there, here = torch.arange(N, device=CUDA), pinned()
    device.hang()
    here.copy_(there, non_blocking=True)
    here[3] = 7
    device.release()
    with device.expect_complaints("the host wrote into 524288 pinned bytes"):
        pass


def test_a_buffer_that_goes_out_and_in_again_on_ordered_streams_is_fine() -> None:
    here, there = pinned(), torch.empty(N, dtype=torch.int64, device=CUDA)
    side = torch.cuda.Stream()
    there.copy_(here, non_blocking=True)
    there.add_(1)
    here.copy_(there, non_blocking=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        there.copy_(here, non_blocking=True)
    torch.cuda.synchronize()
    assert there.cpu().equal(torch.arange(N) + 1) and here.equal(there.cpu()) and not device.complaints()


def test_memory_that_is_unregistered_under_a_copy_is_told() -> None:
    cuda = torch.cuda.cudart()
    here, there = torch.zeros(N, dtype=torch.int64), torch.empty(N, dtype=torch.int64, device=CUDA)
    assert int(cuda.cudaHostRegister(here.data_ptr(), here.nbytes, 0)) == 0
    device.hang()
    there.copy_(here, non_blocking=True)
    assert int(cuda.cudaHostUnregister(here.data_ptr())) == 0
    device.release()
    with device.expect_complaints("cudaHostUnregister: a queued copy still uses this memory"):
        pass


def test_copies_from_memory_that_is_not_pinned_are_counted() -> None:
    there = torch.empty(N, dtype=torch.int64, device=CUDA)
    there.copy_(pinned())
    assert "copy h2d pageable" not in device.counts()
    there.copy_(torch.arange(N))
    there.cpu()
    assert device.counts()["copy h2d pageable"] == device.counts()["copy d2h pageable"] == 1


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes: in stream order, without hints."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


def copy_batch(copies: list[tuple[int, int, int]], stream: int) -> int:
    """cudaMemcpyBatchAsync of CUDA 13 for targets, sources and bytes: its code."""
    targets, sources, sizes = zip(*copies, strict=True)
    count, order = len(copies), _Attributes(1)
    arrays = (ctypes.c_void_p * count)(*targets), (ctypes.c_void_p * count)(*sources), (ctypes.c_size_t * count)(*sizes)
    about = ctypes.byref(order), ctypes.byref(ctypes.c_size_t(0)), ctypes.c_size_t(1)
    code: int = RUNTIME.cudaMemcpyBatchAsync(*arrays, ctypes.c_size_t(count), *about, ctypes.c_void_p(stream))
    return code


def test_a_batch_of_copies_has_the_bits_of_all_and_no_order() -> None:
    here, there, side = pinned(), torch.zeros(N, dtype=torch.int64, device=CUDA), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    part = N // 4 * 8
    copies = [(there.data_ptr() + i * part, here.data_ptr() + i * part, part) for i in range(4)]
    assert copy_batch(copies, side.cuda_stream) == 0
    assert device.counts()["cudaMemcpyBatchAsync"] == 1 and device.counts()["copy h2d"] == 4
    with device.expect_complaints("RACE: "):
        there.sum()
    side.synchronize()
    assert torch.equal(there.cpu(), here)
    # The third reads what the first writes.
    with device.expect_complaints("its copies depend on each other"):
        assert copy_batch([*copies[:2], (here.data_ptr() + 3 * part, there.data_ptr(), part)], side.cuda_stream) != 0
    with device.expect_complaints("a copy has no bytes"):
        assert copy_batch([(there.data_ptr(), here.data_ptr(), 0)], side.cuda_stream) != 0
    # The legacy stream takes none.
    assert copy_batch(copies, 0) != 0


def test_a_copy_in_the_wrong_direction_is_told() -> None:
    there, here = torch.empty(8, device=CUDA), torch.zeros(8).pin_memory()
    host_to_device, device_to_host = 1, 2

    def copy(kind: int) -> int:
        to, source = ctypes.c_void_p(there.data_ptr()), ctypes.c_void_p(here.data_ptr())
        return int(RUNTIME.cudaMemcpyAsync(to, source, ctypes.c_size_t(32), kind, None))

    assert copy(host_to_device) == 0
    torch.cuda.synchronize()
    with device.expect_complaints("the kind 2 does not fit the addresses"):
        assert copy(device_to_host) != 0
    assert RUNTIME.cudaGetLastError() != 0


def test_work_on_memory_that_was_freed_is_told() -> None:
    block = ctypes.c_void_p()
    assert RUNTIME.cudaMalloc(ctypes.byref(block), ctypes.c_size_t(N)) == 0 and RUNTIME.cudaFree(block) == 0
    with device.expect_complaints("65536 bytes reach outside a device block"):
        assert RUNTIME.cudaMemset(block, 0, ctypes.c_size_t(N)) != 0
    assert RUNTIME.cudaGetLastError() != 0


def test_the_driver_knows_what_it_gave() -> None:
    torch.cuda.empty_cache()
    before = device.live_bytes()
    device.reset()
    device.reset_peak()
    value = torch.empty(40 << 20, dtype=torch.uint8, device=CUDA)
    del value
    torch.cuda.empty_cache()
    assert device.live_bytes() == before and device.live_bytes(peak=True) == before + (40 << 20)
    assert device.counts()["cudaMalloc 0"] == device.counts()["cudaFree 0"] == 1


def test_sleep_keeps_a_stream_busy() -> None:
    """Of a duration the least is promised, not the most."""
    begin = time.monotonic()
    torch.cuda._sleep(50_000_000)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert time.monotonic() - begin >= 0.05


def test_a_stream_hangs_until_it_is_released() -> None:
    device.hang()
    value = torch.ones(4, device=CUDA)
    assert not torch.cuda.current_stream().query()
    device.release()
    assert value.sum().item() == 4


def test_a_kernel_that_faults_ends_everything_after_it() -> None:
    value = torch.ones(4, device=CUDA)
    torch.cuda.synchronize()
    device.inject_fault("aten::mul", nth=2)
    value.mul_(2)
    torch.cuda.synchronize()
    value.mul_(2)
    for call in (torch.cuda.synchronize, value.cpu):
        with pytest.raises(RuntimeError, match="an illegal memory access was encountered"):
            call()
    device.release()
    assert value.cpu().eq(2).all(), "what comes after a fault does not happen"


def test_pinning_can_fail() -> None:
    memory = torch.zeros(N)
    with device.pin_limit(1000):
        assert int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == OUT_OF_MEMORY
    assert RUNTIME.cudaGetLastError() == OUT_OF_MEMORY


def test_pinning_can_fail_above_a_sum_and_copies_stay_within_one_piece() -> None:
    cuda: Any = torch.cuda.cudart()
    memory, there = torch.zeros(4 << 12, dtype=torch.uint8), torch.empty(1 << 12, dtype=torch.uint8, device=CUDA)
    page = -(-memory.data_ptr() // 4096) * 4096
    begin = page - memory.data_ptr()
    with device.pin_limit(more=4096):
        assert int(cuda.cudaHostRegister(page, 4096, 0)) == 0
        assert int(cuda.cudaHostRegister(page + 4096, 4096, 0)) == OUT_OF_MEMORY
    assert RUNTIME.cudaGetLastError() == OUT_OF_MEMORY
    there.copy_(memory[begin : begin + 4096])
    there.copy_(memory[begin + 4096 : begin + 8192])
    with pytest.raises(RuntimeError, match="invalid argument"):
        there.copy_(memory[begin + 1 : begin + 4097])
    assert int(cuda.cudaHostUnregister(page)) == 0


def test_dropout_draws_from_cudas_generator() -> None:
    ones = torch.ones(N, device=CUDA)
    torch.manual_seed(3)
    first, second = (torch.nn.functional.dropout(ones, 0.5) for _ in range(2))
    torch.manual_seed(3)
    assert torch.nn.functional.dropout(ones, 0.5).equal(first) and not first.equal(second)
    assert 0.4 < first.count_nonzero().item() / N < 0.6


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_is_that_of_the_host(dtype: torch.dtype, causal: bool) -> None:
    """Flash attention for bf16, the memory-efficient kernel for fp32, with fewer heads of keys than of queries."""
    queries, keys, values = (torch.randn(2, heads, 24, 16, dtype=dtype) for heads in (4, 2, 2))

    def attend(*given: torch.Tensor) -> list[torch.Tensor]:
        inputs = [t.clone().requires_grad_() for t in given]
        q, k, v = inputs
        grouped = [t.repeat_interleave(2, 1) for t in (k, v)]
        result = torch.nn.functional.scaled_dot_product_attention(q, *grouped, is_causal=causal)
        result.float().square().sum().backward()
        return [result.detach().cpu(), *(t.grad.cpu() for t in inputs if t.grad is not None)]

    here = attend(queries, keys, values)
    for ours, theirs in zip(attend(*(t.to(CUDA) for t in (queries, keys, values))), here, strict=True):
        torch.testing.assert_close(ours, theirs)


FOUR, HERE = torch.rand(4, 4), torch.tensor(2.0)
_ROWS = torch.tensor([0, 1])
_ELSEWHERE = "Expected all tensors to be on the same device"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: x + FOUR, f"{_ELSEWHERE}, but found at least two devices, cuda:0 and cpu!"),
        (lambda x: FOUR * x.sum(), _ELSEWHERE),
        (lambda x: FOUR.clone().add_(x), _ELSEWHERE),
        (lambda x: HERE.clone().add_(x.sum()), _ELSEWHERE),
        (lambda x: x @ FOUR, f"{_ELSEWHERE}, but got mat2 is on cpu, different from other tensors on cuda:0"),
        (lambda x: torch.cat([x.sum()[None], HERE[None]]), _ELSEWHERE),
        (lambda x: torch.where(FOUR > 0, x, x), _ELSEWHERE),
        (lambda x: x.clamp(min=HERE), _ELSEWHERE),
        (lambda x: x.addcmul(HERE, HERE), "too many CPU scalars"),
        (lambda x: torch.nn.functional.layer_norm(x, (4,), FOUR[0]), _ELSEWHERE),
        (lambda x: torch.nn.functional.embedding(_ROWS, x), _ELSEWHERE),
        (lambda x: x.index_select(0, _ROWS), _ELSEWHERE),
        (lambda x: FOUR[_ROWS.to(CUDA)], "indices should be either on cpu or on the same device"),
        (lambda x: x.clone().index_put_((_ROWS,), FOUR[:2]), _ELSEWHERE),
        (lambda x: torch._foreach_add([x], [FOUR]), _ELSEWHERE),
        (lambda x: x.uniform_(generator=torch.Generator()), "Expected a 'cuda' device type for generator"),
        (lambda x: x.long() @ x.long(), "not implemented for 'Long'"),
    ],
)
def test_what_a_real_device_refuses_is_refused(call: Callable[[torch.Tensor], object], words: str) -> None:
    with pytest.raises((RuntimeError, IndexError), match=words):
        call(torch.ones(4, 4, device=CUDA))


def test_numbers_and_indices_of_the_host_are_operands() -> None:
    x = torch.ones(4, 4, device=CUDA)
    y = torch.where(x > HERE, HERE, x) + HERE
    y[_ROWS] = HERE
    assert y[_ROWS].eq(2).all() and y[[2, 3]].eq(3).all()
    assert torch.lerp(x, y, HERE).sum().item() == 64 and x.copy_(FOUR).cpu().equal(FOUR)
    torch._foreach_copy_([x], [FOUR])


class Dim3(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


def test_a_kernel_that_nothing_computes_is_counted() -> None:
    one, kernel = Dim3(1, 1, 1), ctypes.c_void_p(1)
    assert RUNTIME.cudaLaunchKernel(kernel, one, one, None, ctypes.c_size_t(0), None) == 0
    assert device.unemulated() == ["unemulated kernel without a name"]
    device.reset()


def shared_memory() -> tuple[CudaMapping, torch.Tensor]:
    """Two MiB that another process could map, and a tensor of them."""
    file, mapping = create_mapping(0, granularity(0))
    os.close(file)
    return mapping, torch.as_tensor(_Exposed(mapping), device=CUDA)


def test_fresh_shared_memory_holds_nothing_of_use() -> None:
    mapping, tensor = shared_memory()
    assert tensor.view(torch.int64).eq(ALL_ONES).all()
    mapping.unmap()


def test_memory_that_is_unmapped_under_queued_work_is_told() -> None:
    mapping, tensor = shared_memory()
    device.hang()
    tensor.clone()
    mapping.unmap()
    device.release()
    with device.expect_complaints("cuMemUnmap of 2097152 bytes that queued work uses"):
        pass


def test_access_that_queued_work_needs_is_told_when_it_goes() -> None:
    mapping, tensor = shared_memory()
    device.hang()
    tensor.add_(1)
    mapping.allow(writes=False)
    device.release()
    with device.expect_complaints("cuMemSetAccess takes access from queued work"):
        pass
    mapping.unmap()


def test_a_write_to_read_only_memory_ends_the_gpus_work() -> None:
    mapping, tensor = shared_memory()
    mapping.allow(writes=False)
    tensor.sum()
    torch.cuda.synchronize()
    tensor.zero_()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        torch.cuda.synchronize()
    device.release()
    assert tensor.view(torch.int64).eq(ALL_ONES).all()
    mapping.unmap()
