"""The op that DeepSpeed compiles in its first process: compiled before the tests, beside lint, which needs one core.

python -m tests.support.deepspeed_op    compiles it where the tests look for it
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
    remove_stale_locks(cache_root())


def remove_stale_locks(root: Path) -> None:
    """Those that no process holds: PyTorch keeps the file open for as long as it builds."""
    locks = list(root.glob(_LOCKS))
    opened = _opened() if locks else set()
    for lock in locks:
        if str(lock.resolve()) not in opened:
            lock.unlink(missing_ok=True)


def _opened() -> set[str]:
    """Paths of all files that this user's processes have open."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        # Processes end, and those of others are not ours to read.
        with suppress(OSError):
            found.add(os.readlink(link))
    return found


@contextmanager
def lock_may_be_gone() -> Iterator[None]:
    """Around a build, whose lock another run may have taken for an older one that was stale and removed.

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
