"""Builds the engine's extension on first use and loads it.

``python -m disco_accel.native.extension`` builds ahead of time. The library lives in a directory keyed by PyTorch's
version and the sources' hash, so a new PyTorch or a changed source rebuilds and nothing else does.

Environment: ``DISCO_BUILD_EXT=0`` never builds (a library built before is still loaded), ``MAX_JOBS`` bounds the
compiler processes, ``TORCH_EXTENSIONS_DIR`` is the parent of the build directory.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from disco_accel.native.cuda_headers import TOOLKITS, cuda_folders
from disco_accel.native.engine_numbers import check_numbers
from disco_accel.native.library_file import Library
from disco_accel.native.plain_library import ROOT, ExtensionError, cache_root, require_building, sources_key

logger = logging.getLogger("disco_accel")

_TORCH = (
    *("direct", "fused", "fused_cuda", "fork_mutex", "planned_alloc", "arena", "write_watch", "content_hash"),
    *("content_key", "watched_tensors", "watch", "python_watch", "rng", "workspace", "wrapped_numbers", "ops"),
    *(
        "ops_decode",
        "ops_lengths",
        "engine_settings",
        "program_tables",
        "compute_thread",
        "peer_paths",
        "runtime_class",
    ),
)
_loaded: set[Path] = set()
_FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-fopenmp", "-fvisibility-inlines-hidden")
"""NDEBUG as in PyTorch's own build, whose headers have assertions for debugging. Nothing here asserts."""


def sources() -> list[Path]:
    """C++ files of the engine's library, in the order in which they are compiled. Each kind of device has a file with
    its side of PyTorch."""
    core, sides = sorted((ROOT / "core").glob("*.cpp")), sorted((ROOT / "torch").glob("*_side.cpp"))
    return [*core, *(ROOT / "torch" / f"{name}.cpp" for name in _TORCH), *sides]


def _key(files: Sequence[Path], flags: Sequence[str]) -> str:
    return sources_key(ROOT, files, (torch.__version__, sys.version.split()[0], *flags))


def _directory(name: str, files: Sequence[Path], words: Sequence[str]) -> Path:
    # What it is linked with counts too: a library made for another engine would bring that engine along.
    return cache_root() / f"{name}-torch{torch.__version__}-{_key(files, words)}"


def build(name: str, files: Sequence[Path], flags: Sequence[str] = _FLAGS, libraries: Sequence[str] = ()) -> Path:
    """Compiles ``files`` into a library unless it is there already, loads it into the process, returns its path.
    ``libraries`` are linker arguments beyond PyTorch's own. Raises ExtensionError as ``build_plain``; the message has
    the compiler's last lines."""
    made_here = False

    def compile_in(working: Path) -> Path:
        nonlocal made_here
        logger.info("compiling %s, once for this machine: minutes on few cores", name)
        _compile(name, files, flags, libraries, working)
        made_here = True
        return _only_library(working)

    def load(path: str) -> None:
        # PyTorch loads what it has compiled. A second copy, where renaming changes the inode, would register its ops
        # a second time, which ends the process.
        if not made_here:
            torch.ops.load_library(path)

    library = Library(_directory(name, files, (*flags, *libraries)), name, compile_in, require_building)
    # Once it is loaded, what becomes of the file concerns other processes alone.
    if library.path not in _loaded:
        library.load(load)
        _loaded.add(library.path)
    return library.path


def _compile(name: str, files: Sequence[Path], flags: Sequence[str], libraries: Sequence[str], working: Path) -> None:
    from torch.utils import cpp_extension

    try:
        cpp_extension.load(
            name,
            [str(file) for file in files],
            extra_cflags=list(flags),
            extra_ldflags=["-fopenmp", "-ldl", *libraries],
            extra_include_paths=[str(ROOT)],
            build_directory=str(working),
            with_cuda=False,
            is_python_module=False,
        )
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        reasons = [str(reason) for reason in (error, error.__cause__) if reason is not None]
        tail = "\n".join("\n".join(reasons).strip().splitlines()[-12:])
        raise ExtensionError(f"building the engine in {working.parent} failed:\n{tail}") from error


def _only_library(working: Path) -> Path:
    """PyTorch adds a number to the name of a library that a process compiles a second time."""
    (library,) = working.glob("*.so")
    return library


@functools.cache
def load_extension() -> Path:
    """Builds the engine if need be and registers ``torch.ops.disco_accel`` and ``torch.classes.disco_accel``.

    Returns the library's path. Raises ExtensionError where it cannot be built, or was built for other Python code.
    """
    library = build("disco_runtime", sources())
    check_numbers(torch.ops.disco_accel.engine_numbers(), library)
    return library


def engine_library() -> Library:
    """The engine's library as it is on disk: to ask about, not to build. Raises ExtensionError without a folder."""

    def never(_: Path) -> Path:
        raise AssertionError("asked for what there is")

    return Library(_directory("disco_runtime", sources(), _FLAGS), "disco_runtime", never, require_building)


def require_tools(reason: str) -> None:
    """As ``require_building``, and ninja counts too, by which PyTorch compiles extensions."""
    require_building(reason)
    if shutil.which("ninja") is None:
        raise ExtensionError(
            f"{reason} and must be compiled once, but ninja is not on PATH: pip install ninja, and put "
            f"{Path(sys.executable).parent} on PATH"
        )


@functools.cache
def load_allocator_shim() -> None:
    """Builds and installs the decorator of the CUDA caching allocator. Raises ExtensionError without CUDA headers."""
    engine = build("disco_runtime", sources())
    # The shim shares the engine's thread-local schedules, so it links the very library that is loaded.
    libraries = (str(engine), f"-Wl,-rpath,{engine.parent}", "-lc10_cuda")
    build("disco_alloc_shim", [ROOT / "cuda" / "alloc_shim.cpp"], cuda_flags(cuda_include()), libraries)
    torch.ops.disco_accel_cuda.install()


def cuda_include() -> tuple[Path, ...]:
    """The folders of CUDA's headers: CUDA_HOME's, else those of PyTorch's own packages, else /usr/local/cuda's. Raises
    ExtensionError: none has the headers of PyTorch's CUDA version."""
    packages = list(dict.fromkeys([Path(torch.__file__).parents[1], *map(Path, filter(None, sys.path))]))
    folders, ignored = cuda_folders(torch.version.cuda, os.environ.get("CUDA_HOME"), packages, TOOLKITS)
    if ignored:
        logger.warning("%s; compiling with %s instead", ignored, folders[0])
    return folders


def cuda_flags(include: Sequence[Path]) -> tuple[str, ...]:
    """Compiler flags of CUDA sources; a CPU build of PyTorch lacks the configured header that they would include."""
    flags = (*_FLAGS, *(f"-I{folder}" for folder in include))
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
