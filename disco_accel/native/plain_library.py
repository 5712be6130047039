"""Libraries of this package's C++ sources that need no PyTorch: built on first use, kept, loaded with ctypes.

Environment: ``DISCO_BUILD_EXT=0`` never builds (a library built before is still loaded), ``TORCH_EXTENSIONS_DIR`` is
the parent of the build directories, ``CXX`` the compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from disco_accel.errors import ExtensionError as ExtensionError
from disco_accel.native.library_file import Library

ROOT = (Path(__file__).parents[1] / "runtime_ext").resolve()
"""Where the sources are: in a checkout a link leads out of the package."""

_FLAGS = ("-std=c++20", "-O2", "-shared", "-fPIC")
_LIBRARIES = ("-ldl", "-lstdc++", "-lm")
"""PEFT may leave CXX set to gcc, which by itself links none of the libraries of C++."""

_ANSWER_SECONDS = 5.0


def cache_root() -> Path:
    """Parent of all build directories: ``TORCH_EXTENSIONS_DIR``, else ``~/.cache/disco_accel/extensions``.

    Raises ExtensionError when there is neither the one nor a home.
    """
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given:
        return Path(given).absolute()
    try:
        return Path.home().absolute() / ".cache" / "disco_accel" / "extensions"
    except RuntimeError as error:
        raise ExtensionError(
            "this user has no home folder for the compiled engine: set HOME, or TORCH_EXTENSIONS_DIR to a folder of "
            "your own"
        ) from error


def sources_key(root: Path, files: Sequence[Path], words: Iterable[str]) -> str:
    """A name for the library of ``files`` below ``root``, with all headers there, on this machine. ``words``: flags and
    the like, on which it depends too."""
    digest = hashlib.sha256()
    for word in (platform.machine(), *words):
        digest.update(word.encode() + b"\0")
    headers = sorted({header for file in files for header in file.parent.glob("*.h")} | set(root.glob("*/*.h")))
    for file in (*files, *headers):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def compiler() -> tuple[str, str | None]:
    """The C++ compiler's name, and its version as it tells it; None: it is not there, or does not answer."""
    name = os.environ.get("CXX", "c++")
    path = shutil.which(name)
    if path is None:
        return name, None
    try:
        # Of the two clang knows the second, and gcc answers the first.
        asked = [path, "-dumpfullversion", "-dumpversion"]
        done = subprocess.run(asked, capture_output=True, text=True, errors="replace", timeout=_ANSWER_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return name, None
    words = done.stdout.split()
    return name, words[0] if words and done.returncode == 0 else None


def require_building(reason: str) -> None:
    """Raises ExtensionError, which begins with ``reason``, when libraries cannot be built here."""
    if os.environ.get("DISCO_BUILD_EXT", "1") == "0":
        raise ExtensionError(f"{reason} and DISCO_BUILD_EXT=0 forbids building it")
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise ExtensionError(
            f"{reason} and must be compiled once, but there is no C++ compiler '{compiler}' on PATH: "
            "install g++ (11 or newer), or set CXX"
        )


def build_plain(name: str, source: str | Sequence[str], root: Path = ROOT, *, flags: Sequence[str] = ()) -> Path:
    """Compile one file below ``root``, or several, into a library unless it is there already; return its path, without
    loading it. ``flags`` come after the usual ones.

    Raises ExtensionError when there is no compiler, building is switched off, the compiler fails, or others than this
    user can have written the library that is there.
    """
    return _plain(name, source, root, flags).ready()


def load_plain(name: str, source: str | Sequence[str], root: Path = ROOT) -> ctypes.CDLL:
    """As ``build_plain``, loaded into this process. Raises ExtensionError, also where it cannot be loaded."""
    return _plain(name, source, root).load(ctypes.CDLL)


def _plain(name: str, source: str | Sequence[str], root: Path, flags: Sequence[str] = ()) -> Library:
    files = [root / file for file in ([source] if isinstance(source, str) else source)]
    directory = cache_root() / f"{name}-{sources_key(root, files, (*_FLAGS, *flags, *_LIBRARIES))}"
    return Library(directory, name, functools.partial(_compile, name, files, flags), require_building)


def _compile(name: str, files: Sequence[Path], flags: Sequence[str], working: Path) -> Path:
    made = working / f"{name}.so"
    sources = [str(file) for file in files]
    command = [os.environ.get("CXX", "c++"), *_FLAGS, *flags, *sources, "-o", str(made), *_LIBRARIES]
    # Temporary files of the compiler go with the rest when the build is killed.
    environment = os.environ | {"TMPDIR": str(working)}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
    if done.returncode != 0 or not made.is_file():
        raise ExtensionError(f"building {files[0].name} failed:\n{done.stderr[-2000:]}")
    return made
