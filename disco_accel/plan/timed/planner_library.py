"""The inner loops of the planner in C++, each of which has a slower one in Python that finds the same."""

from __future__ import annotations

import ctypes
import functools
import logging

from disco_accel.native.plain_library import ExtensionError, load_plain

logger = logging.getLogger("disco_accel")


@functools.cache
def planner_library() -> ctypes.CDLL | None:
    """Return the library, compiled once, or None where there is no compiler; the user is told so once."""
    try:
        library = load_plain("disco_plan", ("plan/place.cpp", "plan/swap.cpp"))
    except ExtensionError as error:
        logger.warning("planning takes several times longer than it has to: %s", str(error).splitlines()[0])
        return None
    library.disco_place.restype = ctypes.c_int64
    library.disco_swaps.restype = None
    return library
