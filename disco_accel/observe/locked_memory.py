"""Page-locked host memory: how much of it this user may have, and how much one call gets."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

from disco_accel.errors import ExecutionError
from disco_accel.host_limits import host_limits, status_of_process, tightest
from disco_accel.native.arena import host_arena
from disco_accel.native.backend import first_accelerator
from disco_accel.native.cuda_backend import pin

_LEAST = 1 << 20
_MOST = 4 << 30
"""Bytes that are tried at most: drivers lock 10 to 36 GB in a second."""
_PART = 4
"""At most this part of the memory that is left is tried."""
_MAY_LOCK = 14
"""CAP_IPC_LOCK, for whose holders the limit does not hold."""


def lock_limit(root: Path) -> dict[str, Any]:
    """``most_locked``: the bytes that a process of this user may lock; None: no limit. ``may_lock_more``: this one has
    the right to lock more."""
    most = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    try:
        rights = int(status_of_process(root).get("CapEff", "0"), 16)
    except ValueError:
        rights = 0
    return {
        "most_locked": None if most == resource.RLIM_INFINITY else most,
        "may_lock_more": bool(rights >> _MAY_LOCK & 1),
    }


def largest_lock(root: Path, *, built: bool) -> dict[str, Any]:
    """The bytes that one call locks. ``tried``: with the first GPU, whose driver has the last word: some bytes were
    locked and unlocked again, and ``refused`` says why not more; else by the limits. ``built``: the engine is there."""
    limits = host_limits(root)
    left = tightest(limits).left
    gpu = first_accelerator(0)
    if gpu is None or not built:
        given = lock_limit(root)
        bound = None if given["may_lock_more"] else given["most_locked"]
        return {"tried": False, "bytes": left if bound is None else min(left, bound), "refused": ""}
    locked, refused = 0, ""
    size = _most(left)
    while size >= _LEAST and not locked:
        try:
            pin(host_arena(size), gpu.device)
            locked = size
        except ExecutionError as error:
            refused = str(error)
            size //= 2
    return {"tried": True, "bytes": locked, "refused": refused}


def _most(left: int) -> int:
    """The largest power of two of bytes that may be tried where so many are ``left``."""
    return 1 << (min(_MOST, max(left // _PART, _LEAST)).bit_length() - 1)
