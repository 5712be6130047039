"""Answers of ``disco-accel plan`` on disk, beside the plan cache's plans: a question that was asked before is answered
at once.

A file is JSON with its own key. None is trusted: one with a fault is ignored, and one line of the log names the fault.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disco_accel.errors import GraphFileError
from disco_accel.graph.strict_json import parse_json
from disco_accel.plan.cache_folder import ForeignFolder, Unusable, own_folder, read_private, remove_oldest, write_file
from disco_accel.version import __version__

logger = logging.getLogger("disco_accel")

MOST_BYTES = 1 << 20
"""An answer takes some kilobytes."""

MOST_FILES = 1024
"""The oldest answers beyond this many are removed when a new one is stored."""

_KEY = "answer_to"
_LIBRARIES = ("torch", "transformers", "peft")
"""Their models and kernels are in the graph."""
_SUFFIXES = (".py", ".cpp", ".h", ".json")


def answer_key(question: Mapping[str, Any]) -> str:
    """The sha256, in hex, of ``question`` (ready for JSON), this package's sources and the libraries' versions."""
    parts = {"question": question, "version": __version__, "sources": _sources(), "libraries": _versions()}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def load_answer(folder: str | os.PathLike[str], key: str) -> dict[str, Any] | None:
    """The answer under ``key`` below the plan cache's ``folder``; None if there is none that can be used."""
    path = _path(folder, key)
    try:
        data = read_private(path, MOST_BYTES)
        found = None if data is None else parse_json(data)
    except OSError as error:
        _say(path, f"cannot be read: {error.strerror or error}")
        return None
    except (GraphFileError, Unusable) as error:
        _say(path, str(error))
        return None
    if found is None:
        return None
    if not isinstance(found, dict) or found.get(_KEY) != key or not isinstance(found.get("figures"), dict):
        _say(path, "made for something else")
        return None
    figures: dict[str, Any] = found["figures"]
    return figures


def store_answer(folder: str | os.PathLike[str], key: str, figures: Mapping[str, Any]) -> None:
    """Keep ``figures`` under ``key``; where that fails, the next run computes them again."""
    path = _path(folder, key)
    data = json.dumps({_KEY: key, "figures": figures}, separators=(",", ":")).encode() + b"\n"
    try:
        with own_folder(path.parent) as handle:
            write_file(handle, path.name, data)
            remove_oldest(handle, MOST_FILES)
    except OSError as error:
        _say(path, f"cannot be written: {error.strerror or error}")
    except ForeignFolder as error:
        _say(path.parent, str(error))


def _path(folder: str | os.PathLike[str], key: str) -> Path:
    return Path(folder).expanduser() / "answers" / f"{key}.json"


def _say(path: Path, reason: str) -> None:
    logger.warning("plan cache: %s: %s; ignored", path, reason.splitlines()[0])


@functools.cache
def _sources() -> str:
    """A hash of all sources of the package: any of them may change a figure."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    # Recipes and the engine are behind links.
    for folder, folders, files in os.walk(package, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            if name.endswith(_SUFFIXES):
                path = Path(folder, name)
                digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in _LIBRARIES}
