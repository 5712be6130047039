"""Programs of CUDA without a GPU: a driver and a runtime of a few calls, on devices that are numbers in a file."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from disco_accel.store.store_command import interposed_library

HERE = Path(__file__).parent
MIB = 1 << 20
TOTAL = 64 * MIB
_DEVICE = struct.Struct("<qqq")


class FakeMachine:
    """The devices of tests/store/fake_cuda.h: what they have, what is taken, how often there was no room."""

    def __init__(self, path: Path, *totals: int) -> None:
        path.write_bytes(b"".join(_DEVICE.pack(total, 0, 0) for total in totals))
        self.path = path
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._count = len(totals)

    def used(self) -> dict[int, int]:
        """Bytes taken of each device that any are taken of."""
        numbers = {device: self._read(device)[1] for device in range(self._count)}
        return {device: used for device, used in numbers.items() if used}

    def fails(self, device: int = 0) -> int:
        return self._read(device)[2]

    def set_used(self, used: int, device: int = 0) -> None:
        """What another program takes. Only while no program allocates there."""
        struct.pack_into("<q", self._memory, device * _DEVICE.size + 8, used)

    def _read(self, device: int) -> tuple[int, int, int]:
        total, used, fails = _DEVICE.unpack_from(self._memory, device * _DEVICE.size)
        return total, used, fails


@dataclass
class World:
    """Two devices, and where a store may listen; ``start`` runs a program of CUDA with the library or without."""

    folder: Path
    binaries: Path
    machine: FakeMachine

    @property
    def socket(self) -> Path:
        return self.folder / "store"

    def environment(self, counted: bool = True, **more: str) -> dict[str, str]:
        found = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "DISCO_STORE"))}
        found |= {"LD_LIBRARY_PATH": str(self.binaries), "FAKE_CUDA_MACHINE": str(self.machine.path)}
        if counted:
            found |= {"LD_PRELOAD": str(interposed_library()), "DISCO_STORE": str(self.socket)}
        return found | more

    def start(self, *words: str, counted: bool = True, **more: str) -> Program:
        """Python, if that is the first word, else tests/store/cuda_program.cpp."""
        command = words if words[0] == sys.executable else (str(self.binaries / "cuda_program"), *words)
        return Program.of(command, self, counted, **more)


@dataclass
class Program:
    """One that runs, spoken to by lines."""

    process: subprocess.Popen[str]

    @classmethod
    def of(cls, command: tuple[str, ...], world: World, counted: bool = True, **more: str) -> Program:
        pipe = subprocess.PIPE
        environment = world.environment(counted, **more)
        return cls(subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True))

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> tuple[str, str]:
        """The rest of what it printed, on both streams."""
        return self.process.communicate(timeout=600)


@contextmanager
def python(
    world: World, code: str, load: str = "runtime = ctypes.CDLL('libcudart.so.12')", **more: str
) -> Iterator[Program]:
    """A Python program that runs ``code`` and waits; it must have come to its end when the context does."""
    lines = ["import ctypes, sys", "size, at = ctypes.c_size_t, ctypes.c_void_p()", load, textwrap.dedent(code)]
    program = world.start(sys.executable, "-c", "\n".join([*lines, "print('done', flush=True)", "input()"]), **more)
    try:
        said = program.line()
        if said != "done":
            raise AssertionError(said + program.end()[1])
        yield program
        program.go_on()
        assert program.end() == ("", "")
    finally:
        program.process.kill()
