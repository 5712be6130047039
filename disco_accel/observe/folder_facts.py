"""Folders with files that are kept between runs: how many, how large, whether this user may add to them."""

from __future__ import annotations

import fnmatch
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_MOST_FILES = 20_000
"""More are not counted: a look takes some microseconds each."""


def folder_facts(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Of the entries of ``folder`` whose names fit one of the patterns: files in each, bytes of all. ``whole``: there
    were no more than are counted. ``why``: why nothing can be added, empty if it can. ``free``: bytes left there."""
    counts: dict[str, int] = {}
    nbytes = left = 0
    for name, size in _files(folder, names):
        left += 1
        if left > _MOST_FILES:
            break
        counts[name] = counts.get(name, 0) + 1
        nbytes += size
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(parent))
    return {
        "folder": str(folder),
        "files": counts,
        "bytes": nbytes,
        "whole": left <= _MOST_FILES,
        "free": shutil.disk_usage(there).free,
        "why": _why_not(there, [there / name for name in names if there == folder.absolute()]),
    }


def _files(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The pattern that each file belongs to, and its bytes. Files that go meanwhile do not count."""
    for entry in _entries(folder):
        pattern = next((name for name in names if fnmatch.fnmatchcase(entry.name, name)), None)
        if pattern is None:
            continue
        waiting = [entry]
        while waiting:
            each = waiting.pop()
            try:
                status = each.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISDIR(status.st_mode):
                waiting += _entries(Path(each.path))
            elif stat.S_ISREG(status.st_mode):
                yield pattern, status.st_size


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []


def _why_not(there: Path, inside: Sequence[Path]) -> str:
    """Why nobody can add files to ``there`` or to those of the folders ``inside`` that exist."""
    for place in (there, *(path for path in inside if path.is_dir())):
        if not place.is_dir():
            return f"{place} is not a folder"
        if not os.access(place, os.W_OK | os.X_OK):
            return f"{place} cannot be written by this user"
    return ""
