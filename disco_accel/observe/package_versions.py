"""Versions of Python and of the libraries around a training, and the oldest of each that this package is tried with.

``pyproject.toml`` is the one place of these. An installed package has a copy in its metadata.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import tomllib
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

OUR_NAME = "disco-accel"
_PROJECT = Path(__file__).parents[2] / "pyproject.toml"
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[^\]]*\])?\s*(?:>=\s*([\d.]+))?\s*(?:;\s*(.*))?")
_TOOLS = "dev"
"""The extra with tools for changing this package."""


def versions(libraries: Sequence[str] = ()) -> dict[str, Any]:
    """The part of the report that needs no PyTorch: versions that are there, and the oldest that are tried."""
    needed, optional = floors()
    names = dict.fromkeys((*needed, *optional, *libraries))
    names.pop("python", None)
    return {
        "disco_accel": version_of(OUR_NAME),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version_of(name) for name in names},
        "oldest": {"needed": needed, "optional": optional},
    }


def version_of(name: str) -> str | None:
    """The installed version of a distribution; None if there is none, or it does not tell."""
    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, OSError, ValueError, KeyError):
        return None


def floors(project: Path = _PROJECT) -> tuple[dict[str, str], dict[str, str]]:
    """Distributions that training needs, and those for single features: name → the oldest version that works, empty
    where any does. ``python`` is among the first. Both are empty where nothing tells."""
    needed: dict[str, str] = {}
    optional: dict[str, str] = {}
    for line in _requirements(project):
        found = _REQUIREMENT.fullmatch(line.strip())
        if found is None or found[1] == OUR_NAME or f'extra == "{_TOOLS}"' in (found[3] or ""):
            continue
        (optional if "extra ==" in (found[3] or "") else needed)[found[1].lower()] = found[2] or ""
    return needed, optional


def is_older(version: str, oldest: str) -> bool:
    """Whether ``version`` comes before ``oldest``, by their leading numbers; one without any does not."""
    given, wanted = (list(map(int, _leading(text))) for text in (version, oldest))
    pairs = list(zip_longest(given, wanted, fillvalue=0))
    return bool(given) and [a for a, _ in pairs] < [b for _, b in pairs]


def _leading(version: str) -> list[str]:
    found = re.match(r"\d{1,9}(?:\.\d{1,9})*", version)
    return found[0].split(".") if found else []


def _requirements(project: Path) -> Iterable[str]:
    """As in metadata: a requirement, and the extra that it belongs to behind it. A checkout's own file comes first: the
    metadata of an editable installation are as old as that."""
    try:
        table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        if table["name"] == OUR_NAME:
            yield f"python>={str(table['requires-python']).removeprefix('>=')}"
            yield from table["dependencies"]
            for extra, lines in table["optional-dependencies"].items():
                yield from (f'{line}; extra == "{extra}"' for line in lines)
            return
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    try:
        found = importlib.metadata.metadata(OUR_NAME)
    except (importlib.metadata.PackageNotFoundError, OSError, ValueError):
        return
    yield f"python>={(found['Requires-Python'] or '').removeprefix('>=')}"
    yield from found.get_all("Requires-Dist") or ()
