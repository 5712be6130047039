"""``WatchedTensors``: no write goes unnoticed, and none is put down to a tensor that it did not touch."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from disco_accel.native.file_arena import FileArena, whole_pages
from disco_accel.native.host_memory import HostMemory, WatchedTensors, writes_are_watched
from disco_accel.native.shared_copies import SharedCopy
from disco_accel.native.shared_memory import READ_ONLY, add_seals, create_file
from tests.support.unwatched import without_watching_writes

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(params=["pages", "hash", "shared pages"])
def watch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Arenas made in the test are watched by the kernel, or read whole; or they are private mappings of a sealed file,
    watched by the kernel."""
    if request.param != "hash" and not writes_are_watched():
        pytest.skip("this kernel does not tell which pages are written to")
    if request.param == "shared pages":
        monkeypatch.setitem(globals(), "_arena", _shared_arena)
    with without_watching_writes() if request.param == "hash" else contextlib.nullcontext():
        yield request.param


def _arena(sizes: list[int]) -> list[torch.Tensor]:
    """Tensors of so many bytes, one behind the other in an arena, of random content."""
    like = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    memory = HostMemory(HostMemory.room_for(like))
    generator = torch.Generator().manual_seed(0)
    return [memory.adopt(torch.randint(256, t.shape, dtype=torch.uint8, generator=generator)) for t in like]


def _shared_arena(sizes: list[int]) -> list[torch.Tensor]:
    """The same over a file in memory that nobody can write to any more."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randint(256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
    nbytes = whole_pages(HostMemory.room_for(tensors))
    file = create_file("test", nbytes)
    copy = SharedCopy(FileArena(file, nbytes), file, is_new=True)
    placed = [copy.put(tensor) for tensor in tensors]
    assert add_seals(file, READ_ONLY)
    copy.arena.watch()
    return placed


SIZES = [1, 63, 64, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 17, 5, 0, 2 * PAGE, 40 * PAGE + 64, 3 << 20, 7]


def test_every_byte_counts_and_neighbours_do_not(watch: str) -> None:
    """A flipped bit at the first, the last and random bytes of each tensor changes that tensor alone."""
    tensors = _arena(SIZES)
    chosen = random.Random(0)
    for i, tensor in enumerate(tensors):
        size = tensor.numel()
        for at in {0, size - 1, *(chosen.randrange(size) for _ in range(6))} if size else ():
            watched = [WatchedTensors([t]) for t in tensors]
            assert not any(w.changed() for w in watched)
            tensor.numpy()[at] ^= 1 << chosen.randrange(8)
            assert [w.changed() for w in watched] == [j == i for j in range(len(tensors))], (i, at)


def test_what_is_read_depends_on_the_watch(watch: str) -> None:
    tensors = _arena(SIZES)
    outside = torch.zeros(1000)
    assert WatchedTensors([*tensors, outside]).hashed_bytes == 4000 + (sum(SIZES) if watch == "hash" else 0)


def test_strided_tensors_are_their_elements(watch: str) -> None:
    """Every element of a transposed weight and of a view with holes; what lies in the holes is somebody else's."""
    whole = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    memory = HostMemory(1 << 16)
    for view in (memory.adopt(whole.t()), whole[:, 2:7], whole[1:5:2], whole.flatten()[:1].expand(4), whole.t()):
        for index in range(view.numel()):
            watched = WatchedTensors([view])
            assert not watched.changed()
            place = divmod(index, view.shape[-1]) if view.dim() == 2 else (index,)
            view.data[place] += 1
            assert watched.changed()
    watched = WatchedTensors([whole[:, 2:7]])
    whole.data[:, 8] = -1
    assert not watched.changed()


def test_several_arenas_and_watches(watch: str) -> None:
    """A watch that was changed stays so, one that is made afterwards starts from the new content."""
    first, second = _arena([5 * PAGE]), _arena([5 * PAGE, 100])
    before = WatchedTensors([*first, *second])
    second[0].numpy()[2 * PAGE] += 1
    after = WatchedTensors([*first, *second])
    assert before.changed() and before.changed() and not after.changed()
    first[0].numpy()[PAGE] += 1
    assert before.changed() and after.changed()
    assert not WatchedTensors([*first, *second]).changed()


def test_memory_that_comes_to_a_freed_arenas_place(watch: str) -> None:
    """While a tensor is watched nothing else appears at its address; afterwards all that is there is new."""
    seen = set()
    for turn in range(20):
        tensors = _arena([64 * PAGE])
        address = tensors[0].data_ptr()
        seen.add(address)
        parameter = torch.nn.Parameter(tensors.pop(), requires_grad=False)
        watched = WatchedTensors([parameter])
        parameter.data = torch.zeros(1)
        other = _arena([64 * PAGE])[0]
        assert other.data_ptr() != address and watched.moved() and watched.changed()
        del watched, parameter
        again = WatchedTensors([other])
        assert not again.changed()
        other.numpy()[turn * PAGE] += 1
        assert again.changed()
        del other, again
    assert len(seen) < 20, "no address was ever used again: the test does not reach what it is about"


def test_two_processes_after_a_fork(watch: str) -> None:
    """A child's writes are its own; to the child every earlier watch counts as changed, and new ones work."""
    tensors = _arena([30 * PAGE, 100])
    watched = WatchedTensors(tensors)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            early = watched.changed()
            tensors[0].numpy()[PAGE] += 1
            mine = _arena([9 * PAGE])
            own = WatchedTensors([*mine, *tensors])
            clean = not own.changed()
            mine[0].numpy()[4 * PAGE] += 1
            noticed = own.changed()
            del watched, own, mine, tensors
            gc.collect()
            status = 0 if early and clean and noticed else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert not watched.changed()
    tensors[0].numpy()[20 * PAGE] += 1
    assert watched.changed()


def test_a_fork_while_another_thread_asks(watch: str) -> None:
    """The child can make, ask and drop watches whatever its parent's threads were doing."""
    tensors = _arena([300 * PAGE])
    inherited = WatchedTensors(tensors)
    stop = threading.Event()

    def ask() -> None:
        # The second call looks at all of them under the lock that making a watch takes.
        while not stop.is_set():
            WatchedTensors(tensors).changed()
            torch.ops.disco_accel.other_holders(tensors * 2000)
            inherited.changed()

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    watched = WatchedTensors(tensors)
                    tensors[0].numpy()[7] += 1
                    status = 0 if watched.changed() and inherited.changed() else 2
                finally:
                    os._exit(status)
            assert _status_within(60, child) == 0
    finally:
        stop.set()
        asking.join()


def _status_within(seconds: float, child: int) -> int:
    """The exit status of a child, which is killed where it takes longer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def test_no_write_of_another_thread_is_lost(watch: str) -> None:
    """Each writer sees its own write in the watch that it made just before, while others make and ask theirs."""
    tensors = _arena([200 * PAGE] * 4)
    missed: list[tuple[int, int]] = []

    def write(which: int) -> None:
        chosen = random.Random(which)
        for turn in range(60):
            watched = WatchedTensors([tensors[which]])
            tensors[which].numpy()[chosen.randrange(200 * PAGE)] ^= 1
            if not watched.changed():
                missed.append((which, turn))

    writers = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert not missed


def test_writes_of_the_kernel_succeed_and_count(watch: str) -> None:
    """read(2) into watched memory, over page borders, into huge pages too."""
    tensors = _arena([PAGE, 5 << 20])
    source = os.open("/dev/zero", os.O_RDONLY)
    try:
        for begin, size in ((10, 1), (PAGE - 1, 2), (1 << 20, 2 << 20)):
            watched = WatchedTensors(tensors)
            assert os.readv(source, [memoryview(tensors[1].numpy()[begin : begin + size])]) == size
            assert watched.changed()
            assert not tensors[1].numpy()[begin : begin + size].any()
    finally:
        os.close(source)


def test_many_scattered_writes(watch: str) -> None:
    """More written places than one answer of the kernel holds: neither the last is missed nor a later watch stained."""
    tensors = _arena([2000 * PAGE, 100 * PAGE])
    every, last = WatchedTensors(tensors), WatchedTensors(tensors[1:])
    tensors[0].numpy()[:: 2 * PAGE] += 1
    assert every.changed() and not last.changed()
    tensors[0].numpy()[:: 2 * PAGE] += 1
    tensors[1].numpy()[99 * PAGE] += 1
    assert last.changed()
    assert not WatchedTensors(tensors).changed()


def test_a_copied_or_replaced_tensor(watch: str) -> None:
    """A version, another storage, and a resize count; a copy's changes do not."""
    tensor = _arena([3 * PAGE])[0]
    watched = WatchedTensors([tensor])
    copy = tensor.clone()
    copy += 1
    assert not watched.changed()
    tensor.zero_()
    assert watched.changed()
    parameter = torch.nn.Parameter(_arena([400])[0].view(torch.float32), requires_grad=False)
    watched = WatchedTensors([parameter])
    parameter.data = parameter.data.clone()
    assert watched.moved() and watched.changed()


def test_a_watch_whose_files_are_closed_by_somebody() -> None:
    """Programs that become daemons close all files: what was watched counts as changed then, and is read."""
    if not writes_are_watched():
        pytest.skip("this kernel does not tell which pages are written to")
    for closed in ("userfaultfd", "pagemap"):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                tensors = _arena([20 * PAGE, 20 * PAGE])
                watched = WatchedTensors(tensors)
                ours = [f for f in os.listdir("/proc/self/fd") if closed in _target(f)]
                for file in ours:
                    os.close(int(file))
                noticed = bool(ours) and watched.changed()
                for made in (tensors, _arena([20 * PAGE])):
                    watched = WatchedTensors(made)
                    noticed = noticed and watched.hashed_bytes > 0 and not watched.changed()
                    made[0].numpy()[9 * PAGE] ^= 1
                    noticed = noticed and watched.changed()
                status = 0 if noticed else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0, closed


def _target(file: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{file}")
    except FileNotFoundError:
        return ""


_FORBIDDEN = """
import ctypes, platform, struct
number = {"x86_64": 323, "aarch64": 282}[platform.machine()]
load, equal, answer = (0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001)
rules = [struct.pack("HBBI", *rule) for rule in (load, equal, answer, (6, 0, 0, 0x7FFF0000))]
rules = ctypes.create_string_buffer(b"".join(rules))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(rules)))
prctl = ctypes.CDLL(None, use_errno=True).prctl
assert prctl(38, 1, 0, 0, 0) == 0 and prctl(22, 2, program, 0, 0) == 0
from disco_accel.native.host_memory import HostMemory, WatchedTensors, writes_are_watched
import torch
tensor = HostMemory(1 << 23).adopt(torch.zeros(1 << 20))
watched = WatchedTensors([tensor])
before = watched.changed()
tensor.data[12345] = 1
print(writes_are_watched(), watched.hashed_bytes, before, watched.changed())
"""


def test_where_userfaultfd_is_forbidden_tensors_are_read() -> None:
    """As in a container under Docker's default profile: the system call fails, and every byte is compared."""
    done = subprocess.run([sys.executable, "-c", _FORBIDDEN], capture_output=True, text=True, timeout=600)
    assert done.stdout == f"False {1 << 22} False True\n", done.stderr[-2000:]


def test_only_host_tensors() -> None:
    with pytest.raises(ValueError, match="on the CPU"):
        WatchedTensors([torch.empty(3, device="meta")])
