"""A store whose device is a GPU: what one process puts another reads, in order, wherever the bytes were meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from disco_accel.errors import ConfigError, DeviceLost, ExecutionError, StoreFull, StoreGone
from disco_accel.store.client import Store
from disco_accel.store.cuda_tier import CudaTier
from tests.emulated import device
from tests.emulated.stores import MIB, Reader, digest, gpu_store, leases, pattern, put_pattern
from tests.store.serving import in_child, until

GRAIN = 2 * MIB
LARGE = 9 * MIB
"""Three pieces of a copy."""
LATE = 100_000_000
"""Nanoseconds that a stream is late."""


@pytest.fixture(scope="module")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with gpu_store(tmp_path_factory.mktemp("store"), "--host", "96MiB", "--device", "24MiB") as (path, _process):
        yield path


@pytest.fixture
def store(socket: Path) -> Iterator[Store]:
    with Store.connect(socket) as connected:
        yield connected


@pytest.fixture(scope="module")
def reader(socket: Path) -> Iterator[Reader]:
    made = Reader(socket)
    yield made
    made.close()


def test_an_object_of_one_process_is_read_by_another_in_order(store: Store, reader: Reader) -> None:
    """Also where the kernel that writes it has not run when it is put."""
    made = store.create((3, 5), torch.float32, "device")
    memory = store.get(made)
    assert memory.device == store.device == torch.device("cuda", 0)
    assert not memory.any(), "new objects are zeros"
    torch.cuda._sleep(LATE)
    memory.fill_(2.5)
    store.put(made)
    assert reader.ask("digest", made) == digest(torch.full((3, 5), 2.5))
    assert store.get(made).eq(2.5).all()


def test_a_final_object_cannot_be_written_to(store: Store, reader: Reader) -> None:
    """By a reader, or by its creator, whose tensors were writable before: CUDA ends the kernel that tries."""
    content = pattern(1000, seed=1)
    made = store.create((1000,), torch.uint8, "device")
    memory = store.get(made)
    memory.copy_(content)
    store.put(made)
    assert "illegal memory access" in reader.ask("write", made)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        memory.add_(1)
        torch.cuda.synchronize()
    device.release()
    assert memory.equal(content) and reader.ask("digest", made) == digest(content)


def test_a_fault_of_the_gpu_before_a_put_is_told(store: Store) -> None:
    """And the object is as before: not final."""
    made = store.create((1000,), torch.uint8, "device")
    memory = store.get(made)
    device.inject_fault("fill_")
    memory.fill_(1)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        store.put(made)
    device.release()
    memory.fill_(2)
    store.put(made)
    assert store.get(made).eq(2).all()


def test_evicted_objects_come_back_with_their_bits(store: Store, reader: Reader) -> None:
    names = [put_pattern(store, LARGE + 1, seed) for seed in range(5)]
    for seed, name in enumerate(names):
        assert store.get(name).equal(pattern(LARGE + 1, seed))
        assert reader.ask("digest", name) == digest(pattern(LARGE + 1, seed))
    figures = store.stats()
    assert figures["evicted"] >= 3 and figures["loaded_bytes"] >= 3 * LARGE
    assert figures["device_used"] <= figures["device_bytes"]
    assert {figures["device_kind"], figures["device_grain"]} == {1, GRAIN}
    for name in names:
        store.free(name)
    until(lambda: store.stats()["device_used"] == 0 and store.stats()["host_used"] == 0)


def test_memory_stays_until_the_gpu_is_done_with_it(store: Store) -> None:
    """A tensor is gone for Python while a kernel that reads it is still queued."""
    content = pattern(GRAIN, seed=2)
    made = put_pattern(store, GRAIN, seed=2)
    until(lambda: leases(store, os.getpid()) == 0)
    device.hang()
    tensor = store.get(made)
    copied = tensor.clone()
    del tensor
    for _ in range(20):
        assert leases(store, os.getpid()) == 1
    device.release()
    until(lambda: leases(store, os.getpid()) == 0)
    assert copied.equal(content)


def test_room_that_queued_kernels_still_use_is_waited_for(store: Store) -> None:
    names = [put_pattern(store, LARGE, seed) for seed in range(4)]
    sums = []
    for name in names:
        torch.cuda._sleep(LATE // 4)
        sums.append(store.get(name).sum())
    assert [int(s) for s in sums] == [int(pattern(LARGE, seed).sum()) for seed in range(4)]
    held = [store.get(name) for name in names[:2]]
    with pytest.raises(StoreFull):
        store.get(names[2])
    del held


def test_the_end_of_a_client_gives_its_memory_back(store: Store, socket: Path) -> None:
    made = put_pattern(store, GRAIN, seed=3)
    other = Reader(socket)
    assert other.ask("hold", made) == digest(pattern(GRAIN, seed=3))
    assert leases(store, other.process.pid) == 1
    store.free(made)
    other.process.send_signal(signal.SIGKILL)
    until(lambda: leases(store, other.process.pid) == 0)
    until(lambda: store.stats()["device_used"] == 0)
    other.close()


def test_a_forked_process_has_no_part_in_it(store: Store) -> None:
    content = pattern(1000, seed=4)
    made = put_pattern(store, 1000, seed=4)
    tensors = [store.get(made)]
    assert in_child(tensors.clear) == 0
    assert tensors[0].equal(content) and leases(store, os.getpid()) >= 1


def test_objects_of_no_bytes(store: Store) -> None:
    made = store.create((0, 7), torch.float32, "device")
    assert store.get(made).device == store.device
    store.put(made)
    assert store.get(made).shape == (0, 7)


def test_tensors_outlive_their_store(tmp_path: Path) -> None:
    with gpu_store(tmp_path, "--host", "8MiB", "--device", "8MiB") as (path, process), Store.connect(path) as store:
        tensor = store.get(put_pattern(store, GRAIN, seed=5))
        process.kill()
        process.wait(30)
        with pytest.raises(StoreGone):
            store.create((1,), torch.uint8, "device")
        assert tensor.equal(pattern(GRAIN, seed=5))


def test_a_store_whose_gpu_is_lost_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_REFUSE", "cuMemcpyDtoHAsync 700")
    with gpu_store(tmp_path, "--host", "8MiB", "--device", "4MiB") as (path, process), Store.connect(path) as store:
        with pytest.raises(StoreGone):
            for seed in range(4):
                put_pattern(store, GRAIN, seed)
        assert process.wait(30) != 0


@pytest.mark.parametrize(
    ("refuse", "says"),
    [
        ("cuMemSetAccess(READ) 801", "CUDA_ERROR_NOT_SUPPORTED.*--device-kind host"),
        ("no virtual memory management 1", "cannot share memory"),
        ("cuMemHostAlloc 2", "OUT_OF_MEMORY"),
        ("cuMemExportToShareableHandle 304", "ulimit -n"),
        ("cuMemCreate 700", "end it and start it again"),
    ],
)
def test_a_driver_that_cannot_do_it_is_refused(refuse: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_REFUSE", refuse)
    with pytest.raises(ConfigError, match=f"--device-kind cuda: .*{says}"):
        CudaTier(MIB)


def test_settings_that_do_not_fit_the_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--device: 512GiB is more than the 8GiB"):
        CudaTier(512 << 30)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES is '1'"):
        CudaTier(MIB)


def test_a_call_of_the_driver_that_fails_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the allocation is left, and the error says what to do."""
    tier = CudaTier(MIB)
    torch.cuda.synchronize()
    before, files = device.live_bytes(), len(os.listdir("/proc/self/fd"))
    for refuse, kind, says in (
        ("cuMemCreate 2", ExecutionError, "smaller --device"),
        ("cuMemExportToShareableHandle 304", ExecutionError, "ulimit -n"),
        ("cuMemMap 1", ExecutionError, "report its version"),
        ("cuMemMap 700", DeviceLost, "end it"),
    ):
        monkeypatch.setenv("EMULATED_REFUSE", refuse)
        with pytest.raises(ExecutionError, match=says) as caught:
            tier.allocate("refused", MIB)
        assert caught.type is kind
    monkeypatch.delenv("EMULATED_REFUSE")
    assert (device.live_bytes(), len(os.listdir("/proc/self/fd"))) == (before, files)
    tier.close(tier.allocate("again", MIB))
    assert device.live_bytes() == before
