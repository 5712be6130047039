"""Links and anchors of Markdown pages, as a forge and the site's generator both resolve them."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from pathlib import Path

_FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"``.+?``|`[^`\n]+`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_MARKUP = re.compile(r"!?\[([^\]]*)\]\([^)]*\)|[`*]|<[^>]+>")


def links_of(page: Path) -> list[str]:
    """The targets of a page's links and pictures, in order; links in code are none."""
    return _LINK.findall(_CODE.sub("", _FENCE.sub("", page.read_text(encoding="utf-8"))))


@functools.cache
def anchors_of(page: Path) -> frozenset[str]:
    """Those of a page's headings that are the same on a forge and on the site."""
    headings = [_MARKUP.sub(r"\1", text) for text in _HEADING.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))]
    return frozenset(_numbered([_on_a_forge(h) for h in headings], "-")) & frozenset(
        _numbered([_on_the_site(h) for h in headings], "_")
    )


def dead_link(page: Path, link: str, root: Path) -> str | None:
    """What is wrong with ``link`` on ``page``, or None. Addresses with a scheme are not followed."""
    if re.match(r"[a-z]+:", link):
        return None
    path, _, anchor = link.partition("#")
    where = f"{page.relative_to(root).as_posix()}: {link}"
    target = (page.parent / path).resolve() if path else page
    if not target.exists() or not target.is_relative_to(root):
        return f"{where}: no such file in the repository"
    if target.is_dir():
        return f"{where}: a folder; link to its README.md"
    if anchor and target.suffix == ".md" and anchor not in anchors_of(target):
        return f"{where}: no heading has this anchor; there are {', '.join(sorted(anchors_of(target)))}"
    return None


def _on_a_forge(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _on_the_site(heading: str) -> str:
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def _numbered(slugs: list[str], mark: str) -> list[str]:
    """The second of two equal ones has a number behind it."""
    seen: Counter[str] = Counter()
    made = []
    for slug in slugs:
        made.append(f"{slug}{mark}{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return made
