"""create, get, put and free: bytes, who may write, what is brought back, and who is told no."""

from __future__ import annotations

import faulthandler
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from disco_accel.errors import ConfigError, StoreError, StoreFull, StoreGone
from disco_accel.store.client import Store
from disco_accel.store.messages import DTYPES, MAX_NEXT_USE
from tests.store.serving import MIB, filled, in_child, open_files, serving, until


@pytest.mark.parametrize("device", ["host", "device"])
def test_what_one_writes_another_reads(tmp_path: Path, device: str) -> None:
    with serving(tmp_path) as server, Store.connect(server.path) as one, Store.connect(server.path) as two:
        made = one.create((3, 5), torch.bfloat16, device)
        wanted = torch.randn(3, 5).to(torch.bfloat16)
        one.get(made).copy_(wanted)
        assert one.get(made).data_ptr() == one.get(made).data_ptr(), "one memory while it is written"
        with pytest.raises(StoreError, match="is not put yet: process"):
            two.get(made)
        one.put(made)
        found = two.get(made)
        assert found.dtype is torch.bfloat16 and torch.equal(found, wanted)


def test_every_element_type_and_shape_comes_back(tmp_path: Path) -> None:
    with serving(tmp_path) as server, Store.connect(server.path) as store:
        for name, size in DTYPES:
            made = store.create((2, 3), getattr(torch, name))
            store.get(made).view(torch.uint8).fill_(1)
            store.put(made)
            found = store.get(made)
            assert found.dtype is getattr(torch, name) and found.shape == (2, 3) and found.element_size() == size
            assert (found.view(torch.uint8) == 1).all()
        for shape in ((), (0,), (4, 0, 2), (1,) * 8):
            made = store.create(shape, torch.float64, "device")
            store.put(made)
            assert store.get(made).shape == shape
        assert store.stats()["malformed"] == 0


def test_tensors_that_live_on_after_a_put_are_private(tmp_path: Path) -> None:
    """Of the creator, and of each reader: what they write is seen by that tensor alone."""
    with serving(tmp_path) as server, Store.connect(server.path) as one, Store.connect(server.path) as two:
        made = one.create((4096,), torch.int32)
        mine = one.get(made)
        part = mine[7:]
        mine.fill_(5)
        one.put(made, next_use=None)
        reader = two.get(made)
        mine[0], reader[1] = 6, 7
        assert (part == 5).all() and mine[0] == 6
        assert reader[0] == 5 and reader[1] == 7
        assert (one.get(made) == 5).all() and (two.get(made) == 5).all()


def test_an_object_that_a_forked_process_can_write_to_is_not_put(tmp_path: Path) -> None:
    """And what its creator writes afterwards still counts."""
    with serving(tmp_path) as server, Store.connect(server.path) as store:
        made = store.create((1024,), torch.int64)
        tensor = store.get(made)
        tensor.fill_(1)
        hold, release = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(release)
            os.read(hold, 1)
            os._exit(0)
        try:
            with pytest.raises(StoreError, match="can still write to it"):
                store.put(made)
        finally:
            os.close(release)
            os.waitpid(child, 0)
            os.close(hold)
        tensor.fill_(2)
        store.put(made)
        assert (store.get(made) == 2).all()


@pytest.mark.parametrize("policy", ["fifo", "lru", "size_aware", "latency_aware", "next_use"])
def test_evicted_objects_come_back_with_their_bytes(tmp_path: Path, policy: str) -> None:
    """Four times as much as the device holds, read in several orders."""
    with serving(tmp_path, device=4 * MIB, policy=policy) as server, Store.connect(server.path) as store:
        sizes = [MIB, 3 * MIB // 2, MIB // 3, 5000] * 4
        made = [filled(store, size, value) for value, size in enumerate(sizes)]
        for order in (range(16), reversed(range(16)), [5, 1, 5, 1, 9, 13, 5, 0]):
            for value in order:
                found = store.get(made[value])
                assert found.numel() == sizes[value] and (found == value).all()
                del found
        stats = store.stats()
        assert stats["fetched"] > 3 and stats["evicted"] > 3 and stats["device_used"] <= 4 * MIB
        assert stats["gets"] == stats["hits"] + stats["fetched"]


def test_a_use_may_be_announced_for_decades_ahead(tmp_path: Path) -> None:
    """The store waits for it like for any other, answers meanwhile, and brings the object when it is asked for."""
    with serving(tmp_path, device=2 * MIB) as server, Store.connect(server.path) as store:
        late = filled(store, MIB, 7, next_use=MAX_NEXT_USE / 1e6)
        for value in range(2):
            filled(store, MIB, value)
        until(lambda: store.stats()["evicted"] > 0)
        assert bool((store.get(late) == 7).all())


def test_an_object_with_a_tensor_of_it_stays_until_the_last_dies(tmp_path: Path) -> None:
    with serving(tmp_path, device=2 * MIB) as server, Store.connect(server.path) as store:
        one, two = filled(store, MIB, 1), filled(store, MIB, 2)
        held = [store.get(one), store.get(two)[5:]]
        with pytest.raises(StoreFull, match=r"device: 1MiB wanted, 0B of 2MiB free; in use: process \d+ 2MiB"):
            store.create((MIB,), torch.uint8, "device")
        held.pop()
        third = filled(store, MIB, 3)
        assert (held[0] == 1).all() and (store.get(third) == 3).all()
        del held[0]
        assert (store.get(two) == 2).all()


def test_a_full_host_refuses_and_names_sizes(tmp_path: Path) -> None:
    """Of objects, and of those that would be evicted to it."""
    with serving(tmp_path, host=2 * MIB, device=2 * MIB) as server, Store.connect(server.path) as store:
        made = [filled(store, MIB, value) for value in range(4)]
        with pytest.raises(StoreFull, match="device: 1MiB wanted"):
            store.create((MIB,), torch.uint8, "device")
        with pytest.raises(StoreFull, match="host: 1MiB wanted, 0B of 2MiB free"):
            store.create((MIB,), torch.uint8)
        store.free(made[0])
        filled(store, MIB, 9, "device")
        assert (store.get(made[3]) == 3).all()


def test_a_quota_bounds_each_client(tmp_path: Path) -> None:
    with (
        serving(tmp_path, quota=2 * MIB) as server,
        Store.connect(server.path) as one,
        Store.connect(server.path) as two,
    ):
        made = [filled(one, MIB, 0), filled(one, MIB, 1, "host")]
        with pytest.raises(StoreFull, match="quota"):
            one.create((1,), torch.uint8)
        filled(two, 2 * MIB, 2)
        one.free(made[0])
        filled(one, MIB, 3)


def test_free_takes_the_name_at_once_and_the_memory_with_the_last_tensor(tmp_path: Path) -> None:
    with serving(tmp_path) as server, Store.connect(server.path) as one, Store.connect(server.path) as two:
        made = filled(one, MIB, 4)
        reader = two.get(made)
        with pytest.raises(StoreError, match=r"is process \d+'s to free"):
            two.free(made)
        one.free(made)
        with pytest.raises(StoreError, match="no object"):
            two.get(made)
        assert (reader == 4).all() and one.stats()["device_used"] == MIB
        del reader
        until(lambda: one.stats()["device_used"] == 0)
        for wrong in (0, -1, 1 << 64, made, made + 1):
            with pytest.raises(StoreError, match="no object"):
                one.get(wrong)


def test_the_end_of_a_connection_takes_its_objects_but_not_what_others_read(tmp_path: Path) -> None:
    with serving(tmp_path) as server, Store.connect(server.path) as two:
        one = Store.connect(server.path)
        half, made = one.create((MIB,), torch.uint8), filled(one, MIB, 4)
        mine, reader = one.get(half), two.get(made)
        one.close()
        until(lambda: len(two.stats()["clients"]) == 1)
        assert two.stats()["host_used"] == 0 and two.stats()["objects"] == 0
        mine.fill_(1)
        assert (reader == 4).all() and (mine == 1).all()
        with pytest.raises(StoreGone, match="was closed"):
            one.ping()
        del reader
        assert two.stats()["device_used"] == 0


def test_a_store_that_ends_leaves_tensors_readable_and_says_how_to_go_on(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        store = Store.connect(server.path)
        store.wanted(1, MIB)
        made = filled(store, MIB, 4)
        tensor = store.get(made)
    assert (tensor == 4).all()
    with pytest.raises(StoreGone, match="connect again"):
        store.get(made)
    with pytest.raises(StoreGone, match="disco-accel store serve"):
        Store.connect(server.path)
    store.close()
    # Another store knows no id of it.
    with serving(tmp_path) as server, Store.connect(server.path) as fresh, pytest.raises(StoreError, match="no object"):
        fresh.get(made)


def test_a_forked_process_uses_a_connection_of_its_own(tmp_path: Path) -> None:
    with serving(tmp_path) as server, Store.connect(server.path) as store:
        made = filled(store, 5000, 3)
        tensor = store.get(made)

        def work() -> None:
            for call in (lambda: store.get(made), lambda: store.put(made), store.ping, lambda: store.held(0)):
                with pytest.raises(StoreError, match="forked this one"):
                    call()
            assert (tensor == 3).all() and not store.alive()
            with Store.connect(server.path) as own:
                assert (own.get(made) == 3).all()

        assert in_child(work) == 0
        until(lambda: len(store.stats()["clients"]) == 1)
        assert store.stats()["clients"][0]["leases"] == 1 and (store.get(made) == 3).all()


def test_a_forked_process_waits_for_no_thread_of_its_parent(tmp_path: Path) -> None:
    """One held all locks of the connection at the fork: in the child nobody gives them back."""
    with serving(tmp_path) as server, Store.connect(server.path) as store:
        made, held, over = filled(store, 5000, 3), threading.Event(), threading.Event()

        def hold() -> None:
            with store._lock, store._channel._turn, store._channel._sending:
                held.set()
                over.wait()

        def work() -> None:
            faulthandler.dump_traceback_later(120, exit=True)
            for call in (lambda: store.get(made), lambda: store.put(made), lambda: store.free(made), store.ping):
                with pytest.raises(StoreError, match="forked this one"):
                    call()
            assert not store.alive()
            store.close()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        try:
            assert in_child(work) == 0
        finally:
            over.set()
            thread.join()


def test_many_threads_share_a_connection_while_tensors_die_anywhere(tmp_path: Path) -> None:
    """Leases end in finalizers, also in the middle of calls: by the cycle collector here."""
    with serving(tmp_path, device=4 * MIB) as server, Store.connect(server.path) as store:
        made = [filled(store, MIB // 2, value) for value in range(16)]
        wrong: list[int] = []

        def work(seed: int) -> None:
            for turn in range(12):
                value = (seed * 7 + turn * 5) % 16
                while True:
                    try:
                        ring: list[Any] = [store.get(made[value])]
                        break
                    except StoreFull:
                        # Tensors in cycles have their leases until they are collected.
                        gc.collect()
                ring.append(ring)
                if not (ring[0] == value).all():
                    wrong.append(value)
                store.ping()
                del ring
                if turn % 4 == 0:
                    gc.collect()

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        threshold = gc.get_threshold()
        gc.set_threshold(20)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            gc.set_threshold(*threshold)
        gc.collect()
        assert not wrong
        assert store.stats()["clients"][0]["leases"] == 0 and store.stats()["malformed"] == 0


def test_a_long_get_holds_up_no_other_thread(tmp_path: Path) -> None:
    """Another thread's calls on the same connection, and another client's, go on while 4 MiB are brought at 8 MB/s."""
    with (
        serving(tmp_path, device=4 * MIB, rate=8e6) as server,
        Store.connect(server.path) as store,
        Store.connect(server.path) as other,
    ):
        made = filled(store, 4 * MIB, 1)
        filled(store, 4 * MIB, 2)
        done: list[float] = []

        def fetch() -> None:
            assert (store.get(made) == 1).all()
            done.append(time.monotonic())

        thread = threading.Thread(target=fetch)
        thread.start()
        until(lambda: store.stats()["fetched"] == 1)
        store.ping()
        other.ping()
        answered = time.monotonic()
        thread.join()
        assert answered < done[0]


def test_an_announced_object_is_back_before_its_time(tmp_path: Path) -> None:
    with serving(tmp_path, device=2 * MIB, policy="next_use") as server, Store.connect(server.path) as store:
        soon = filled(store, MIB, 1, next_use=400.0)
        late = filled(store, MIB, 2, next_use=900.0)
        store.prefetch(soon)
        # The first is copied ahead when the second takes the last room; were it on its way, it would leave.
        until(lambda: store.stats()["saved_bytes"] == MIB)
        third = filled(store, MIB, 3, next_use=300.0)
        assert store.stats()["evicted"] == 1, "the one that is used last"
        store.free(third)
        store.put(late, next_use=0.2)
        until(lambda: store.stats()["prefetched"] == 1)
        assert (store.get(late) == 2).all() and (store.get(soon) == 1).all()
        assert store.stats()["hits"] == store.stats()["gets"]


def test_arguments_are_refused_by_name(tmp_path: Path) -> None:
    with serving(tmp_path) as server, Store.connect(server.path) as store:
        for shape, dtype, device, says in (
            ((1,), torch.float32, "disk", "device: 'disk'"),
            ((1,), torch.qint8, "host", "dtype: torch.qint8"),
            ((-1,), torch.float32, "host", "shape: "),
            ((1.5,), torch.float32, "host", r"shape: \(1.5,\) is not a sequence of whole numbers"),
            (3, torch.float32, "host", "shape: 3 is not a sequence"),
            ((1,) * 9, torch.float32, "host", "shape: 9 dimensions"),
            ((1 << 44,), torch.float64, "host", "shape: an object of"),
        ):
            with pytest.raises(ConfigError, match=says):
                store.create(shape, dtype, device)
        made = store.create((1,), torch.float32)
        for next_use in (-1.0, float("inf"), float("nan")):
            with pytest.raises(ConfigError, match="next_use"):
                store.put(made, next_use)


def test_programs_that_a_client_starts_get_no_descriptor_of_the_store(tmp_path: Path) -> None:
    with serving(tmp_path) as server, Store.connect(server.path) as store:
        before = set(os.listdir("/proc/self/fd"))
        store.wanted(0, MIB)
        store.get(store.create((1000,), torch.uint8))
        new = [int(name) for name in set(os.listdir("/proc/self/fd")) - before]
        found = [name for name in new if os.path.exists(f"/proc/self/fd/{name}") and os.get_inheritable(name)]
        assert len(new) > 1 and not found


def test_nothing_stays_open(tmp_path: Path) -> None:
    with serving(tmp_path), Store.connect(tmp_path / "own" / "store"):
        pass
    before = open_files()
    with serving(tmp_path, device=2 * MIB) as server:
        for _ in range(3):
            with Store.connect(server.path) as store:
                store.wanted(0, MIB)
                made = [filled(store, MIB // 2, value) for value in range(6)]
                assert (store.get(made[0]) == 0).all()
                store.get(store.create((1,), torch.int8))
    assert not open_files() - before


def test_a_put_that_an_interrupt_ends_is_a_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tensor would be private and its later writes lost."""
    with serving(tmp_path) as server, Store.connect(server.path) as store:
        made = store.create((10,), torch.uint8)
        tensor = store.get(made)
        tensor.fill_(1)
        ask, calls = store._channel.ask, []

        def interrupted(request: Any) -> Any:
            calls.append(request)
            found = ask(request)
            if len(calls) == 1:
                raise KeyboardInterrupt
            return found

        monkeypatch.setattr(store._channel, "ask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.put(made)
        tensor.fill_(2)
        assert len(calls) == 2 and (store.get(made) == 1).all() and (tensor == 2).all()
