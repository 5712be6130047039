"""Compiled kernels of runs: compiled once for this machine, in processes beside the training, and kept on disk."""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from disco_accel.errors import ExtensionError
from disco_accel.fuse.call_json import call_to_object, kernel_name, kernel_text
from disco_accel.fuse.compiler_process import FOLDERS, _CompilerProcess, _Stopped, idle_process
from disco_accel.fuse.host_library import ANSWER, symbol_of
from disco_accel.fuse.twins import twin_of
from disco_accel.graph.files import write_atomically
from disco_accel.graph.taskgraph import OpCall
from disco_accel.native.arithmetic import processor
from disco_accel.native.backend import backend_of, run_device
from disco_accel.native.extension import load_extension
from disco_accel.native.library_file import Library, read_own
from disco_accel.native.plain_library import cache_root, require_building, sources_key
from disco_accel.threads import start_thread

Kernel = int | str
"""The engine's handle of a kernel, or why there is none."""
Say = Callable[[str], None]

_TOGETHER = {"host": (8, 16), "gpu": (3, 3)}
"""Kernels of one library: as few as the first number says, or as many as the second where all processes have work. The
headers of C++ take two seconds to read, a kernel a quarter of one; GPU code takes a second a kernel, and a machine with
a GPU has many cores."""
_INDEX = "fused.names"
"""Beside a library, a line for each of its kernels, in their order: ``kernel_name``."""
_MOST_INDEX = 1 << 16
CACHED = ("fused-*", *FOLDERS.values())
"""Names, as patterns, of all that is kept of kernels in ``cache_root()``."""
_ROOT = Path(__file__).parents[1]
_known: dict[str, Kernel] = {}
"""The kernels of this process by ``kernel_text``: plans of all models share them."""
_origins: dict[int, _LibraryKernel] = {}
"""Where they come from, by handle. No handle is given twice in a process."""
_loaded: dict[str, tuple[dict[int, Kernel], str]] = {}
"""Libraries for the host by path: their kernels, and the sha256 of each."""
_one_at_a_time = threading.Lock()


def kernel_of(call: OpCall) -> Kernel | None:
    """The kernel of a run; None where it is not compiled."""
    return _known.get(kernel_text(call))


def is_compiled(call: OpCall) -> bool:
    """Whether the kernel of a run is known, and that of its twin."""
    twin = twin_of(call)
    return kernel_of(call) is not None and (twin is None or kernel_of(twin) is not None)


@dataclass(frozen=True, slots=True)
class _LibraryKernel:
    """Where a kernel comes from: the library in ``folder``, whose bytes have the sha256 ``digest``, and its ``number``
    there. ``name``: as of ``kernel_name``, of the call that it was compiled for."""

    folder: Path
    digest: str
    number: int
    name: str


def library_kernel(kernel: int) -> _LibraryKernel | None:
    """Where the kernel with this handle comes from; None for one that was not loaded here."""
    return _origins.get(kernel)


def load_kernels(calls: Iterable[OpCall], device: str) -> None:
    """Load the kernels of ``calls``, and of their twins, that earlier processes have compiled, in any library. Raises
    ExtensionError."""
    missing, gpu = _missing(calls, device)
    named = {kernel_name(call): call for call in missing}
    for names in _libraries(gpu):
        if not named:
            return
        part = _Part(names, {number: named[name] for number, name in enumerate(names) if name in named}, gpu)
        if part.calls and part.library(None).fault() is None:
            with suppress(_NotLoaded):
                _known.update(part.kernels(None))
                for name in names:
                    named.pop(name, None)


def compile_kernels(calls: Iterable[OpCall], device: str, say: Say = lambda _: None) -> None:
    """Compile the kernels of ``calls``, and of their twins, in several processes; ``say`` hears how far it is. Where
    this process ends meanwhile, some are missing then.

    Raises:
        ExtensionError: there is no compiler, it fails, or the folder is not this user's own.
    """
    with _one_at_a_time:
        most = max(1, (os.cpu_count() or 1) // 2)
        parts, gpu = _parts(calls, device, most)
        if not parts:
            return
        # The compilers of C++ and of GPU code keep a core each; the training has the others.
        processes = [idle_process.take(cache_root(), gpu) for _ in range(min(len(parts), most))]
        work = _Shared(parts, say)
        threads = [start_thread(work.run, each, name="disco-fused", stop=each.stop) for each in processes]
        for thread in threads:
            if thread is not None:
                thread.join()
        for process in processes if work.failed is not None else processes[1:]:
            process.stop()
        if work.failed is not None:
            raise work.failed
        idle_process.keep(processes[0])


class _NotLoaded(ExtensionError):
    """A library has to be compiled anew."""


@dataclass(frozen=True)
class _Part:
    """One library, for ``gpu`` (None: for the host): the ``names`` of its kernels, and the calls of those that are
    wanted, by number."""

    names: tuple[str, ...]
    calls: Mapping[int, OpCall]
    gpu: dict[str, Any] | None

    def library(self, process: _CompilerProcess | None) -> Library:
        def compile_in(folder: Path) -> Path:
            if process is None:
                raise _NotLoaded("nothing is compiled here")
            calls = [call_to_object(self.calls[number]) for number in range(len(self.names))]
            return process.compile({"gpu": self.gpu, "name": "fused", "calls": calls, "folder": str(folder)})

        directory = cache_root() / f"{_prefix(self.gpu)}{_key(self.names)}"
        return Library(directory, "fused", compile_in, require_building)

    def kernels(self, process: _CompilerProcess | None) -> dict[str, Kernel]:
        """From its library, which is compiled first where it is missing. Raises ExtensionError."""
        library = self.library(process)
        try:
            found, digest = library.load(self._load)
        except RuntimeError as error:
            raise ExtensionError(f"fused kernels cannot be loaded: {str(error).splitlines()[0]}") from error
        for number, kernel in found.items():
            if isinstance(kernel, int):
                _origins[kernel] = _LibraryKernel(library.directory, digest, number, self.names[number])
        if process is not None:
            _write_index(library.directory, self.names)
        return {kernel_text(call): found[number] for number, call in self.calls.items()}

    def _load(self, path: str) -> tuple[dict[int, Kernel], str]:
        """The kernels by number, and the sha256 of the library. Raises OSError."""
        try:
            found, digest = _host_library(path) if self.gpu is None else _cuda_kernels(path, self.calls.keys())
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise OSError(f"it has no kernels: {error}") from error
        return {number: found.get(number, "its library has no such kernel") for number in self.calls}, digest


class _Shared:
    """Parts that several threads compile, each the next one that is left."""

    def __init__(self, parts: Sequence[_Part], say: Say) -> None:
        self._left, self._all, self._say = list(parts), sum(len(part.calls) for part in parts), say
        self._done, self._lock = 0, threading.Lock()
        self.failed: ExtensionError | None = None

    def run(self, process: _CompilerProcess) -> None:
        """Until none is left, or one has failed."""
        while self.failed is None:
            with self._lock:
                part = self._left.pop() if self._left else None
            if part is None:
                return
            try:
                found = part.kernels(process)
            except _Stopped:
                return
            except ExtensionError as error:
                self.failed = error
                return
            with self._lock:
                _known.update(found)
                self._done += len(part.calls)
                self._say(f"compiled {self._done} of {self._all} fused kernels")


def _missing(calls: Iterable[OpCall], device: str) -> tuple[list[OpCall], dict[str, Any] | None]:
    """Those of ``calls``, and of their twins, that have no kernel yet, and the GPU that they are for."""
    load_extension()
    gpu = backend_of(run_device(device)).target()
    wanted = [each for call in calls for each in (call, twin_of(call)) if each is not None]
    named = {kernel_text(call): call for call in wanted}
    return [named[name] for name in sorted(named.keys() - _known.keys())], gpu


def _parts(calls: Iterable[OpCall], device: str, processes: int) -> tuple[list[_Part], dict[str, Any] | None]:
    """The libraries that are missing, and the GPU that they are for."""
    missing, gpu = _missing(calls, device)
    least, most = _TOGETHER["host" if gpu is None else "gpu"]
    count = min(max(least, -(-len(missing) // processes)), most)
    together = [missing[at : at + count] for at in range(0, len(missing), count)]
    return [_Part(tuple(map(kernel_name, part)), dict(enumerate(part)), gpu) for part in together], gpu


def _libraries(gpu: dict[str, Any] | None) -> Iterator[tuple[str, ...]]:
    """Names of the kernels of each library for ``gpu`` that has an index."""
    prefix = _prefix(gpu)
    for folder in sorted(cache_root().glob(f"{prefix}*")):
        try:
            data = read_own(folder / _INDEX, _MOST_INDEX)
        except (ExtensionError, OSError):
            continue
        names = tuple((data or b"").decode("ascii", "replace").split())
        # The folder's own name tells whether they are those of the library.
        if names and folder.name == f"{prefix}{_key(names)}":
            yield names


def _write_index(folder: Path, names: Sequence[str]) -> None:
    data = "".join(f"{name}\n" for name in names).encode()
    # Without it the next process compiles the kernels again.
    with suppress(ExtensionError, OSError):
        if read_own(folder / _INDEX, _MOST_INDEX) != data:
            write_atomically(folder / _INDEX, data)


def _prefix(gpu: dict[str, Any] | None) -> str:
    """Of the names of all folders with libraries of this version for ``gpu``."""
    return f"fused-torch{torch.__version__}-{_key((_versions(gpu), json.dumps(gpu, sort_keys=True)))}-"


def _key(words: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def _host_library(path: str) -> tuple[dict[int, Kernel], str]:
    """The kernels of a library of ``host_library.py``, and its sha256. Both are of the file that this process has
    loaded: under the same name the loader gives no other one. Raises OSError."""
    if path not in _loaded:
        digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        _loaded[path] = _host_kernels(path), digest
    return _loaded[path]


def _host_kernels(path: str) -> dict[int, Kernel]:
    """The kernels of a library of ``host_library.py``. Raises OSError."""
    library = ctypes.CDLL(path)
    answer = json.loads(ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, ANSWER))))
    found: dict[int, Kernel] = {int(number): reason for number, reason in answer["refused"].items()}
    for number in range(answer["calls"]):
        if number not in found:
            address = ctypes.cast(getattr(library, symbol_of(number)), ctypes.c_void_p).value
            found[number] = int(torch.ops.disco_accel.fused_host_kernel(address))
    return found


def _cuda_kernels(path: str, wanted: Collection[int]) -> tuple[dict[int, Kernel], str]:
    """The kernels of a file of ``cuda_library.py`` that are ``wanted``, and its sha256. Raises OSError."""
    data = Path(path).read_bytes()
    answer = json.loads(data)
    found: dict[int, Kernel] = {int(number): reason for number, reason in answer["refused"].items()}
    for number, kernel in answer["kernels"].items():
        if int(number) not in wanted:
            continue
        code = torch.frombuffer(bytearray(base64.b64decode(kernel["code"])), dtype=torch.uint8)
        given = kernel["name"], kernel["launch"], kernel["order"], kernel["numbers"]
        found[int(number)] = int(torch.ops.disco_accel.fused_cuda_kernel(code, *given))
    return found, hashlib.sha256(data).hexdigest()


def _versions(gpu: dict[str, Any] | None) -> str:
    """All else that a kernel depends on."""
    names = ("inductor.py", "host_library.py", "cuda_library.py", "evaluate.py", "value_views.py")
    files = [_ROOT / "fuse" / name for name in names]
    words = (torch.__version__, torch.backends.cpu.get_cpu_capability(), os.environ.get("CXX", ""))
    # Compilers use all instructions of the host that they run on.
    return sources_key(_ROOT, files, (*words, *(processor() if gpu is None else ())))
