"""A program that knows nothing of the store is counted by a preloaded library, to the byte, and runs as without it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from disco_accel.store import messages
from disco_accel.store.store_command import interposed_library
from tests.store.fake_cuda import HERE, MIB, TOTAL, FakeMachine, World, python
from tests.store.stand_in_store import REQUEST, StandInStore, stand_in_store


@pytest.fixture
def store(world: World) -> Iterator[StandInStore]:
    with stand_in_store(world.socket) as made:
        yield made


@pytest.mark.parametrize("seed", [1, 2])
def test_random_calls_in_threads_are_counted_to_the_byte(world: World, store: StandInStore, seed: int) -> None:
    """Runtime and driver by link, dlsym, cuGetProcAddress and the runtime; linear, pitched, arrays, pools, physical."""
    program = world.start("random", str(seed), "4", "5")
    pid = program.process.pid
    for number in range(5):
        assert program.line() == f"round {number}"
        used = world.machine.used()
        assert used and sum(used.values()) > MIB
        store.wait_for({pid: used})
        program.go_on()
    assert program.line() == "reset"
    program.go_on()
    assert program.end() == ("", "")
    assert store.messages > 500 and store.lowest == 0
    assert world.machine.fails() + world.machine.fails(1) > 0


def test_counts_without_what_pools_have_reserved_are_those_of_allocations(world: World, store: StandInStore) -> None:
    code = "runtime.cudaMallocAsync(ctypes.byref(at), size(1000), None)"
    with python(world, code, FAKE_NO_POOL_ATTRIBUTES="1") as program:
        store.wait_for({program.process.pid: {0: 1000}})
        assert world.machine.used() == {0: 1024}


def test_an_allocation_that_would_fail_succeeds_because_a_grant_shrank(world: World, store: StandInStore) -> None:
    world.machine.set_used(TOTAL - MIB)
    asked = []

    def shrink(device: int, nbytes: int) -> None:
        asked.append((device, nbytes))
        while world.machine.fails() == 0:  # the first try has failed by then: it waits
            pass
        world.machine.set_used(TOTAL - 9 * MIB)

    store.on_change = shrink
    program = world.start("hold", str(8 * MIB), DISCO_STORE_WAIT="60")
    assert program.line() == "parent 0 last 0"
    assert asked == [(0, 8 * MIB)]
    store.wait_for({program.process.pid: {0: 8 * MIB}})
    program.end()


def test_an_allocation_that_fails_in_the_end_is_not_counted(world: World, store: StandInStore) -> None:
    world.machine.set_used(TOTAL - MIB)
    program = world.start("hold", str(8 * MIB), DISCO_STORE_WAIT="0.05")
    assert program.line() == "parent 2 last 2"
    tries = world.machine.fails()
    assert tries > 1
    store.wait_for({})
    # One wait in vain is not followed by another one at once.
    program.go_on()
    assert program.line() == "again 2 last 2"
    assert world.machine.fails() == tries + 1
    program.end()


def test_more_than_a_device_has_makes_nobody_shrink(world: World, store: StandInStore) -> None:
    program = world.start("hold", str(TOTAL + 1))
    assert program.line() == "parent 2 last 2"
    program.end()
    assert store.messages == 0


def test_kill_gives_everything_back(world: World, store: StandInStore) -> None:
    program = world.start("hold", str(5 * MIB))
    assert program.line() == "parent 0 last 0"
    store.wait_for({program.process.pid: {0: 5 * MIB}})
    program.process.send_signal(signal.SIGKILL)
    program.end()
    store.wait_for({})


def test_without_a_store_a_program_runs_as_alone(world: World) -> None:
    world.machine.set_used(TOTAL - MIB)
    program = world.start("hold", str(8 * MIB), DISCO_STORE_WAIT="600")
    for word in ("parent", "again"):
        assert program.line() == f"{word} 2 last 2"
        program.go_on()
    assert program.line() == "again 2 last 2"
    _, errors = program.end()
    assert errors.count("\n") == 1 and f"no store listens at {world.socket}" in errors


def test_a_store_that_ends_and_one_that_comes(world: World) -> None:
    with stand_in_store(world.socket) as store:
        program = world.start("hold", str(MIB))
        assert program.line() == "parent 0 last 0"
        store.wait_for({program.process.pid: {0: MIB}})
    program.go_on()
    assert program.line() == "again 0 last 0"
    # The next one gets the whole sum, at a call not long after it came.
    with stand_in_store(world.socket) as store:
        count = 2
        while not store.connections():
            time.sleep(0.1)
            count += 1
            program.go_on()
            assert program.line() == "again 0 last 0"
        store.wait_for({program.process.pid: {0: count * MIB}})
        _, errors = program.end()
    assert errors.count("\n") == 1 and "the store is gone" in errors


def test_a_forked_child_is_counted_by_itself(world: World, store: StandInStore) -> None:
    program = world.start("fork", str(MIB))
    lines = sorted(program.line() for _ in range(3))
    assert lines[0] == "child 0 last 0" and lines[2] == "parent 0 last 0"
    child = int(lines[1].removeprefix("forked "))
    parent = program.process.pid
    store.wait_for({parent: {0: MIB}, child: {0: MIB}})
    # The parent's connection ends with the parent, although its child lives on.
    program.process.kill()
    program.process.wait()
    store.wait_for({child: {0: MIB}})
    os.kill(child, signal.SIGKILL)
    program.end()
    store.wait_for({})


def test_forks_among_threads_that_allocate_do_not_hang(world: World, store: StandInStore) -> None:
    program = world.start("forks", "60")
    assert program.line() == "well 60"
    end = time.monotonic() + 30
    # A store that is behind hears of the last frees with a later call.
    while store.held() and time.monotonic() < end:
        time.sleep(0.01)
        program.go_on()
        assert program.line() == "again"
    store.wait_for({})
    assert program.end() == ("", "") and world.machine.used() == {0: 6000}


def test_a_python_program_that_opens_the_runtime_itself(world: World, store: StandInStore) -> None:
    code = """
    assert runtime.cudaMalloc(ctypes.byref(at), size(3000)) == 0
    driver = ctypes.CDLL('libcuda.so.1')
    other = ctypes.c_ulonglong()
    assert driver.cuMemAlloc_v2(ctypes.byref(other), size(500)) == 0
    """
    with python(world, code) as program:
        store.wait_for({program.process.pid: {0: 3500}})
        assert world.machine.used() == {0: 3500}


def test_a_device_has_its_number_on_the_machine(world: World, store: StandInStore) -> None:
    code = """
    import os
    os.environ["CUDA_VISIBLE_DEVICES"] = "5,3"
    runtime.cudaSetDevice(1)
    runtime.cudaMalloc(ctypes.byref(at), size(3000))
    """
    with python(world, code) as program:
        store.wait_for({program.process.pid: {3: 3000}})


def test_memory_of_a_graph_that_is_captured_is_not_counted(world: World, store: StandInStore) -> None:
    code = """
    driver = ctypes.CDLL('libcuda.so.1')
    driver.fakeCapture(1)
    assert runtime.cudaMallocAsync(ctypes.byref(at), size(3000), None) == 0 and at.value
    assert runtime.cudaFreeAsync(at, None) == 0
    driver.fakeCapture(0)
    assert runtime.cudaMalloc(ctypes.byref(at), size(70)) == 0
    """
    with python(world, code) as program:
        store.wait_for({program.process.pid: {0: 70}})
        assert store.messages == 1


def test_the_runtime_s_last_error_is_the_program_s_own(world: World, store: StandInStore) -> None:
    """Room that came late leaves no error behind; an error that the program has yet to see stays, and nothing waits."""
    world.machine.set_used(TOTAL - MIB)

    def shrink(device: int, nbytes: int) -> None:
        if nbytes == 2 * MIB:
            world.machine.set_used(0)

    store.on_change = shrink
    code = f"""
    assert runtime.cudaFree(ctypes.c_void_p(77)) == 1 and runtime.cudaPeekAtLastError() == 1
    assert runtime.cudaMalloc(ctypes.byref(at), size(100)) == 0
    assert runtime.cudaGetLastError() == 1 and runtime.cudaGetLastError() == 0
    assert runtime.cudaMalloc(ctypes.byref(at), size({2 * MIB})) == 0
    assert runtime.cudaGetLastError() == 0
    """
    with python(world, code, DISCO_STORE_WAIT="60") as program:
        store.wait_for({program.process.pid: {0: 100 + 2 * MIB}})


def test_a_program_that_closes_files_it_does_not_know_keeps_its_own(world: World, store: StandInStore) -> None:
    code = """
    import os
    runtime.cudaMalloc(ctypes.byref(at), size(100))
    theirs = [int(name) for name in os.listdir('/proc/self/fd') if int(name) >= 3]
    os.closerange(3, 1024)
    read, write = os.pipe()
    for number in theirs:
        if number not in (read, write):
            os.dup2(write, number)
    runtime.cudaMalloc(ctypes.byref(at), size(200))
    os.set_blocking(read, False)
    try:
        raise SystemExit(f"{len(os.read(read, 1000))} bytes in a file of the program")
    except BlockingIOError:
        pass
    """
    with python(world, code) as program:
        store.wait_for({program.process.pid: {0: 300}})


def test_whoever_looks_for_cuda_does_not_find_the_library_instead(world: World) -> None:
    code = """
    everything = ctypes.CDLL(None)
    for name in ('cudaMalloc', 'cuMemAlloc_v2'):
        try:
            getattr(everything, name)
            raise SystemExit(name)
        except AttributeError as error:
            assert 'undefined symbol' in str(error), error
    here = everything.dlsym
    here.restype = ctypes.c_void_p
    assert here(None, b'malloc') and not here(None, b'cudaMalloc')
    """
    with python(world, code, load=""):
        pass


def test_results_are_those_without_the_library(world: World, store: StandInStore) -> None:
    found = []
    for counted in (True, False):
        FakeMachine(world.machine.path, TOTAL, TOTAL)
        program = world.start("random", "7", "1", "2", counted=counted)
        found.append(program.process.communicate("\n" * 9, timeout=600))
    assert found[0] == found[1] and "reset" in found[0][0]


def test_the_library_brings_no_other_libraries() -> None:
    """One that a program has itself, in another version, would be taken from here."""
    listed = subprocess.run(["readelf", "-d", interposed_library()], capture_output=True, text=True, check=True).stdout
    needed = [line.split("[")[1].rstrip("]") for line in listed.splitlines() if "NEEDED" in line]
    assert needed and all(name.startswith(("libc.so", "ld-linux")) for name in needed)


def test_library_and_store_agree_on_the_message(tmp_path: Path) -> None:
    assert (messages.REQUEST.format, messages.REQUEST.size) == (REQUEST.format, 104)
    source = """
    #include <cstdio>
    #include "interpose/wire.h"
    int main() {
      const auto message = disco::interpose::first_class(5, -123456789012);
      std::fwrite(&message, sizeof(message), 1, stdout);
      std::fprintf(stderr, "%zu", sizeof(disco::interpose::Reply));
    }
    """
    (tmp_path / "say.cpp").write_text(source)
    program = tmp_path / "say"
    include = f"-I{HERE.parents[1] / 'runtime_ext'}"
    subprocess.run(["c++", "-std=c++20", include, tmp_path / "say.cpp", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, check=True)
    request = messages.Request(messages.Opcode.FIRST_CLASS, device=5, amount=-123456789012)
    assert messages.parse_request(done.stdout) == request and request.pack() == done.stdout
    assert int(done.stderr) == messages.REPLY.size
