"""Errors that tell of the machine as it was for a moment, not of the model: a step that met one may be tried again."""

from __future__ import annotations

import errno

from disco_accel.errors import BudgetTooSmall

_NUMBERS = (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT)
_WORDS = (
    "allocate memory",
    "out of memory",
    "bad_alloc",
    "bad allocation",
    "can't start new thread",
    "temporarily unavailable",
)
"""Of PyTorch's CPU allocator, CUDA, C++ and Python, which have no class of their own for it."""


def is_shortage(error: BaseException) -> bool:
    """Whether ``error`` says that memory, threads, files or room on a disk ran out."""
    if isinstance(error, BudgetTooSmall):
        # The next try has the same budget.
        return False
    # A SystemError is native code that failed without saying why, as some does that finds no memory.
    if isinstance(error, (MemoryError, SystemError)) or any(
        kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__
    ):
        return True
    if isinstance(error, OSError) and error.errno in _NUMBERS:
        return True
    return any(words in str(error).lower() for words in _WORDS)


def met_shortage(error: BaseException) -> bool:
    """Whether ``error`` or one that led to it is a shortage."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if is_shortage(link):
            return True
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return False
