"""What an answer of the self-check holds for: the device, its driver, PyTorch and this package's own sources.

A change of any of these asks for a new check. What depends on the model is not in it: plans are verified by themselves.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from disco_accel.native.backend import backend_of
from disco_accel.version import __version__

_PACKAGE = Path(__file__).resolve().parents[1]
_PARTS = ("capture", "execute", "graph", "measure", "native", "plan", "runtime_ext", "selfcheck", "simulate", "verify")
_KINDS = (".py", ".cpp", ".h", ".cu")


def identity_of(device: torch.device) -> dict[str, str]:
    """What a check on ``device`` is about, for people to read and for ``key_of``."""
    software = {
        "disco_accel": __version__,
        "sources": _sources(),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }
    return {**backend_of(device).identity(), **software}


def key_of(identity: Mapping[str, str]) -> str:
    """The sha256 of ``identity``, in hex."""
    return hashlib.sha256(json.dumps(dict(sorted(identity.items()))).encode()).hexdigest()


@functools.cache
def _sources() -> str:
    """A hash of what captures, plans and runs, Python and C++."""
    digest = hashlib.sha256()
    for part in _PARTS:
        # The last part may be a link to another folder, which rglob would not follow.
        folder = (_PACKAGE / part).resolve()
        for path in sorted(p for p in folder.rglob("*") if p.suffix in _KINDS and p.is_file()):
            digest.update(f"{part}/{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
