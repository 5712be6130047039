"""The op that DeepSpeed compiles in its first process: compiled before the tests, beside lint, which needs one core.

python -m tests.deepspeed_op    compiles it where the tests look for it
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from disco_accel.native.plain_library import cache_root

_LOCKS = "deepspeed_*/lock"
"""Below the folder of ops: PyTorch makes one while it builds, and removes it."""


def use_cache() -> None:
    """DeepSpeed's ops are kept beside our engine, for this process and those that it starts.

    PyTorch's lock on an extension outlives a process that is killed while it builds, and whoever needs the extension
    next waits for ever: DeepSpeed's, which no one builds but these tests, would hang all of them.
    """
    os.environ["TORCH_EXTENSIONS_DIR"] = str(cache_root())
    for lock in cache_root().glob(_LOCKS):
        lock.unlink(missing_ok=True)


@contextmanager
def lock_may_be_gone() -> Iterator[None]:
    """Around a build, whose lock another run's ``use_cache`` may have removed by the time it is given back.

    The build itself has ended well then: the error of one that failed is raised on.
    """
    try:
        yield
    except FileNotFoundError as error:
        if error.__context__ is not None or not Path(str(error.filename)).match(_LOCKS):
            raise


def main() -> None:
    """Nothing to do where DeepSpeed is not installed: its tests skip."""
    if importlib.util.find_spec("deepspeed") is None:
        return
    use_cache()
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    with lock_may_be_gone():
        ShareMemCommBuilder().load()


if __name__ == "__main__":
    main()
