"""Libraries of this package's C++ sources that need no PyTorch: built on first use, kept, loaded with ctypes.

Environment: ``DISCO_BUILD_EXT=0`` never builds (a library built before is still loaded), ``TORCH_EXTENSIONS_DIR`` is
the parent of the build directories, ``CXX`` the compiler.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from disco_accel.errors import ExecutionError

ROOT = Path(__file__).resolve().parents[1] / "runtime_ext"
"""Where the sources are."""

_FLAGS = ("-std=c++20", "-O2", "-shared", "-fPIC")


class ExtensionError(ExecutionError):
    """The extension cannot be built or loaded; the message says what is missing and what to do."""


def cache_root() -> Path:
    """Parent of all build directories: ``TORCH_EXTENSIONS_DIR``, else ``~/.cache/disco_accel/extensions``."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given else Path.home() / ".cache" / "disco_accel" / "extensions"


def sources_key(root: Path, files: Sequence[Path], words: Iterable[str]) -> str:
    """A name for what compiling ``files`` below ``root``, with all headers there, gives on this machine.

    ``words``: what else it depends on, such as flags."""
    digest = hashlib.sha256()
    for word in (platform.machine(), *words):
        digest.update(word.encode() + b"\0")
    headers = sorted({header for file in files for header in file.parent.glob("*.h")} | set(root.glob("*/*.h")))
    for file in (*files, *headers):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def require_building(library: Path) -> None:
    """Raises ExtensionError when ``library``, which is not there, cannot be built either."""
    if os.environ.get("DISCO_BUILD_EXT", "1") == "0":
        raise ExtensionError(f"{library} is not built and DISCO_BUILD_EXT=0 forbids building it")
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise ExtensionError(
            f"{library.stem} must be compiled once, but there is no C++ compiler '{compiler}' on PATH: "
            "install g++ (11 or newer), or set CXX"
        )


def build_plain(name: str, source: str, root: Path = ROOT) -> Path:
    """Compile one file below ``root`` into a library unless it is there already; return its path, without loading it.

    Raises ExtensionError when there is no compiler, building is switched off, or the compiler fails.
    """
    file = root / source
    directory = cache_root() / f"{name}-{sources_key(root, [file], _FLAGS)}"
    library = directory / f"{name}.so"
    if library.exists():
        return library
    require_building(library)
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f"{name}.{os.getpid()}.so"
    command = [os.environ.get("CXX", "c++"), *_FLAGS, str(file), "-o", str(partial), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise ExtensionError(f"building {source} failed:\n{done.stderr[-2000:]}")
    partial.replace(library)
    return library
