"""The environment variable of transformers' that is set while this package loads a checkpoint through it.

A file of its own, so that ``config/settings.py`` is about our own config; like it, one of the few that
``tests/test_imports.py`` lets read the environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_NO_THREADS_VARIABLE = "HF_DEACTIVATE_ASYNC_LOAD"


@contextmanager
def transformers_reads_in_turn() -> Iterator[None]:
    """Inside, transformers reads a tensor of a checkpoint when it uses it: its threads would read the others ahead.

    Loads in other threads do so too, meanwhile.
    """
    before = os.environ.get(_NO_THREADS_VARIABLE)
    os.environ[_NO_THREADS_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_NO_THREADS_VARIABLE, None)
        else:
            os.environ[_NO_THREADS_VARIABLE] = before
