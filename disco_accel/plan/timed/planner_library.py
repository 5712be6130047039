"""The inner loops of the timed planner, in C++."""

from __future__ import annotations

import ctypes
import functools

from disco_accel.native.plain_library import load_plain


@functools.cache
def planner_library() -> ctypes.CDLL:
    """Return the library, compiled once. Raises ExtensionError where there is no compiler."""
    library = load_plain("disco_plan", ("plan/place.cpp", "plan/swap.cpp"))
    library.disco_place.restype = ctypes.c_int64
    library.disco_swaps.restype = None
    return library
