#!/usr/bin/env python3
"""A C++ compiler that keeps what it has compiled: of a tree with one changed file it compiles that file.

Used as ``CXX``. EMULATED_OBJECTS names the folder of the objects. One is looked up by the command, the source and the
headers beside it; system headers and the compiler itself are taken to stay as they are.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

COMPILER = "c++"
_NAMED_BY_CALLER = ("-o", "-MF")


def compile_kept(arguments: Sequence[str], objects: Path) -> int:
    """Run the compiler with ``arguments``, or put the object there that it made last time; its exit status."""
    sources = [Path(word) for word in arguments if word.endswith(".cpp")]
    if "-c" not in arguments or len(sources) != 1:
        return subprocess.call([COMPILER, *arguments])
    target = Path(arguments[arguments.index("-o") + 1])
    kept = objects / (_key(arguments, sources[0]) + ".o")
    if not kept.exists():
        status = subprocess.call([COMPILER, *arguments])
        if status != 0:
            return status
        objects.mkdir(parents=True, exist_ok=True)
        # Another process may be at the same object.
        working = kept.with_suffix(f".{os.getpid()}.{target.name}")
        shutil.copyfile(target, working)
        working.rename(kept)
    shutil.copyfile(kept, target)
    return 0


def _key(arguments: Sequence[str], source: Path) -> str:
    ours = [w for i, w in enumerate(arguments) if {w, arguments[i - 1] if i else ""}.isdisjoint(_NAMED_BY_CALLER)]
    digest = hashlib.sha256("\0".join(ours).encode())
    # Sources lie one folder below the tree that they include from.
    for path in [source, *sorted(source.resolve().parents[1].rglob("*.h"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


if __name__ == "__main__":
    sys.exit(compile_kept(sys.argv[1:], Path(os.environ["EMULATED_OBJECTS"])))
