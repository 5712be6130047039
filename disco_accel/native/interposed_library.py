"""The library that counts a program's device memory from within, preloaded into one that knows nothing of it.

It stands in front of CUDA's calls that allocate and free, and tells a store about them: ``docs/first_class.md``.
"""

from __future__ import annotations

from pathlib import Path

from disco_accel.native.plain_library import ROOT, build_plain

WAIT_VARIABLE = "DISCO_STORE_WAIT"
"""Seconds that an allocation without room waits for others to make some."""

_FLAGS = ("-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-static-libgcc", "-Wl,--as-needed", "-Wl,-z,defs")
"""It needs the C library alone: a program may bring a C++ library of its own, which must be the one that it gets."""


def interposed_library() -> Path:
    """The library to preload, built on first use. Raises ExtensionError."""
    sources = sorted((ROOT / "interpose").glob("*.cpp"))
    return build_plain("disco_interpose", [source.relative_to(ROOT).as_posix() for source in sources], flags=_FLAGS)
