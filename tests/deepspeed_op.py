"""The op that DeepSpeed compiles in its first process: compiled before the tests, beside lint, which needs one core.

python -m tests.deepspeed_op    compiles it where the tests look for it
"""

from __future__ import annotations

import importlib.util
import os

from disco_accel.native.plain_library import cache_root


def use_cache() -> None:
    """DeepSpeed's ops are kept beside our engine, for this process and those that it starts.

    PyTorch's lock on an extension outlives a process that is killed while it builds, and whoever needs the extension
    next waits for ever: DeepSpeed's, which no one builds but these tests, would hang all of them.
    """
    os.environ["TORCH_EXTENSIONS_DIR"] = str(cache_root())
    for lock in cache_root().glob("deepspeed_*/lock"):
        lock.unlink(missing_ok=True)


def main() -> None:
    """Nothing to do where DeepSpeed is not installed: its tests skip."""
    if importlib.util.find_spec("deepspeed") is None:
        return
    use_cache()
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    ShareMemCommBuilder().load()


if __name__ == "__main__":
    main()
