"""A hook of MkDocs: pages link to files of the repository as a forge reads them; here those files join the site.

A file outside ``docs/`` has the address ``repository/`` and its path; its own links are followed in turn. A comment
``<!-- api: NAME -->`` becomes the signature and docstring of that name.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<=\]\()(?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?(?=\))")
API = re.compile(r"^<!-- api: ([\w.]+) -->$", re.MULTILINE)


def source_of(place: str) -> str:
    """The path in the repository of a file of the site."""
    return place.removeprefix("repository/") if place.startswith("repository/") else f"docs/{place}"


def place_of(path: str) -> str:
    """The place on the site of a path in the repository."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def target(page: str, link: str) -> str:
    """The path in the repository that a relative ``link`` on ``page``, also a path there, leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside ``docs/`` that pages link to, and those that these link to."""
    waiting = [file.src_uri for file in files if file.src_uri.endswith(".md")]
    while waiting:
        page = source_of(waiting.pop())
        for link in LINK.finditer((ROOT / page).read_text(encoding="utf-8")):
            path = target(page, link["path"])
            if (ROOT / path).is_file() and files.get_file_from_path(place_of(path)) is None:
                files.append(File.generated(config, place_of(path), abs_src_path=str(ROOT / path)))
                waiting += [place_of(path)] if path.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links by places on the site, and the directives of mkdocstrings."""
    place = page.file.src_uri

    def moved(link: re.Match[str]) -> str:
        led = place_of(target(source_of(place), link["path"]))
        return posixpath.relpath(led, posixpath.dirname(place) or ".") + (link["anchor"] or "")

    return API.sub(r"::: \1", LINK.sub(moved, markdown))
