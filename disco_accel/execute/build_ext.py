"""Builds the engine's extension on first use and loads it.

``python -m disco_accel.execute.build_ext`` builds ahead of time. The library lives in a directory keyed by PyTorch's
version and the sources' hash, so a new PyTorch or a changed source rebuilds and nothing else does.

Environment: ``DISCO_BUILD_EXT=0`` never builds (a library built before is still loaded), ``MAX_JOBS`` bounds the
compiler processes, ``TORCH_EXTENSIONS_DIR`` is the parent of the build directory.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from disco_accel.errors import ExecutionError

_ROOT = Path(__file__).resolve().parents[2] / "runtime_ext"
_TORCH = (
    "direct.cpp",
    "planned_alloc.cpp",
    "arena.cpp",
    "watch.cpp",
    "rng.cpp",
    "ops.cpp",
    "cuda_side.cpp",
    "runtime_class.cpp",
)
_FLAGS = ("-std=c++20", "-O2", "-fopenmp", "-fvisibility-inlines-hidden")
_PLAIN_FLAGS = ("-std=c++20", "-O2", "-shared", "-fPIC")


class ExtensionError(ExecutionError):
    """The extension cannot be built or loaded; the message says what is missing and what to do."""


def sources() -> list[Path]:
    """C++ files of the engine's library, in the order in which they are compiled."""
    core = sorted((_ROOT / "core").glob("*.cpp"))
    return [*core, *(_ROOT / "torch" / name for name in _TORCH)]


def cache_root() -> Path:
    """Parent of all build directories: ``TORCH_EXTENSIONS_DIR``, else ``~/.cache/disco_accel/extensions``."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given else Path.home() / ".cache" / "disco_accel" / "extensions"


def _key(files: Sequence[Path], flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in (torch.__version__, platform.machine(), sys.version.split()[0], *flags):
        digest.update(part.encode() + b"\0")
    headers = sorted({header for file in files for header in file.parent.glob("*.h")} | set(_ROOT.glob("*/*.h")))
    for file in (*files, *headers):
        digest.update(file.relative_to(_ROOT).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _require_compiler() -> None:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise ExtensionError(
            f"the engine must be compiled once, but there is no C++ compiler '{compiler}' on PATH: "
            "install g++ (11 or newer), or set CXX"
        )


def build(name: str, files: Sequence[Path], flags: Sequence[str] = _FLAGS, libraries: Sequence[str] = ()) -> Path:
    """Compiles ``files`` into a library unless it is there already, loads it into the process, returns its path.

    ``libraries`` are linker arguments beyond PyTorch's own.

    Raises ExtensionError when there is no compiler, building is switched off, or the compiler fails (its last
    lines are in the message).
    """
    # What it is linked with counts too: a library made for another engine would bring that engine along.
    directory = cache_root() / f"{name}-torch{torch.__version__}-{_key(files, (*flags, *libraries))}"
    library = directory / f"{name}.so"
    if not library.exists():
        if os.environ.get("DISCO_BUILD_EXT", "1") == "0":
            raise ExtensionError(f"{library} is not built and DISCO_BUILD_EXT=0 forbids building it")
        _require_compiler()
        directory.mkdir(parents=True, exist_ok=True)
        with _alone_in(directory):
            if not library.exists():
                _compile(name, files, flags, libraries, directory)
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    return library


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """One process at a time builds in ``directory``; a build that was killed leaves nothing that holds up the next."""
    with (directory / ".building").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        # PyTorch's own lock is a file, which outlives whoever made it: alone here, nobody can be behind it.
        (directory / "lock").unlink(missing_ok=True)
        yield


def _compile(name: str, files: Sequence[Path], flags: Sequence[str], libraries: Sequence[str], directory: Path) -> None:
    from torch.utils import cpp_extension

    try:
        cpp_extension.load(
            name,
            [str(file) for file in files],
            extra_cflags=list(flags),
            extra_ldflags=["-fopenmp", "-ldl", *libraries],
            extra_include_paths=[str(_ROOT)],
            build_directory=str(directory),
            with_cuda=False,
            is_python_module=False,
        )
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        (directory / f"{name}.so").unlink(missing_ok=True)
        reasons = [str(reason) for reason in (error, error.__cause__) if reason is not None]
        tail = "\n".join("\n".join(reasons).strip().splitlines()[-12:])
        raise ExtensionError(f"building the engine in {directory} failed:\n{tail}") from error


def build_plain(name: str, source: str) -> Path:
    """Compiles one file below ``runtime_ext`` that needs no PyTorch into a library, without loading it."""
    file = _ROOT / source
    directory = cache_root() / f"{name}-{_key([file], _PLAIN_FLAGS)}"
    library = directory / f"{name}.so"
    if library.exists():
        return library
    _require_compiler()
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f"{name}.{os.getpid()}.so"
    command = [os.environ.get("CXX", "c++"), *_PLAIN_FLAGS, str(file), "-o", str(partial), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise ExtensionError(f"building {source} failed:\n{done.stderr[-2000:]}")
    partial.replace(library)
    return library


@functools.cache
def load_extension() -> Path:
    """Builds the engine if need be and registers ``torch.ops.disco_accel`` and ``torch.classes.disco_accel``.

    Returns the library's path.
    """
    return build("disco_runtime", sources())


@functools.cache
def load_allocator_shim() -> None:
    """Builds and installs the decorator of the CUDA caching allocator. Raises ExtensionError without CUDA headers."""
    engine = build("disco_runtime", sources())
    include = cuda_include()
    if include is None:
        raise ExtensionError("the CUDA allocator shim needs CUDA's headers (cuda_runtime_api.h): set CUDA_HOME")
    # The shim shares the engine's thread-local schedules, so it links the very library that is loaded.
    libraries = (str(engine), f"-Wl,-rpath,{engine.parent}", "-lc10_cuda")
    build("disco_alloc_shim", [_ROOT / "cuda" / "alloc_shim.cpp"], cuda_flags(include), libraries)
    torch.ops.disco_accel_cuda.install()


def cuda_include() -> Path | None:
    """The folder of cuda_runtime_api.h, from CUDA_HOME, PyTorch's own packages or /usr/local/cuda; None if absent."""
    roots = [Path(home) / "include" for home in (os.environ.get("CUDA_HOME"),) if home]
    roots += sorted(Path(torch.__file__).parents[1].glob("nvidia/*/include"))
    roots.append(Path("/usr/local/cuda/include"))
    return next((root for root in roots if (root / "cuda_runtime_api.h").exists()), None)


def cuda_flags(include: Path) -> tuple[str, ...]:
    """Compiler flags of CUDA sources; a CPU build of PyTorch lacks the configured header that they would include."""
    flags = (*_FLAGS, f"-I{include}")
    return flags if torch.version.cuda else (*flags, "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE")


def main() -> int:
    """Builds ahead of time and prints where the library is."""
    try:
        print(build("disco_runtime", sources()))
    except ExtensionError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
