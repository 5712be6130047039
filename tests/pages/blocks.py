"""The code blocks and the commands in running text of the Markdown pages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

LANGUAGES = ("sh", "python", "yaml", "json", "text")
"""Info strings of fences. A ``text`` block is a drawing or output, not something to type."""

REASONS = (r"needs a GPU", r"needs the network", r"needs two machines", r"long: .+")
"""Why a block is not run, in ``<!-- not run: REASON -->`` on the line before its fence."""

_FENCE = re.compile(
    r"(?:^<!-- (?P<marker>[^\n]*?) -->\n)?^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_INLINE = re.compile(r"`((?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:disco-accel|make|python -m [a-z_.]+|accelerate)\b[^`]*)`")


@dataclass(frozen=True)
class Block:
    """A fenced block: ``line`` of its fence in ``page``, ``marker`` the comment on the line before it."""

    page: str
    line: int
    language: str
    text: str
    marker: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def reason(self) -> str | None:
        """Why it is not run, or None."""
        return self.marker.removeprefix("not run: ") if self.marker and self.marker.startswith("not run: ") else None

    @property
    def file(self) -> str | None:
        """The file that a reader saves this as: of ``<!-- file: NAME -->`` or a first line ``# NAME.yaml``."""
        if self.marker and self.marker.startswith("file: "):
            return self.marker.removeprefix("file: ")
        first = re.match(r"# (\S+\.(?:yaml|py))\n", self.text)
        return first[1] if first and self.language in ("yaml", "python") else None


def blocks_of(page: Path, name: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    content = page.read_text(encoding="utf-8")
    return [
        Block(name, content.count("\n", 0, m.start("language")) + 1, m["language"].strip(), m["text"], m["marker"])
        for m in _FENCE.finditer(content)
    ]


def inline_commands(page: Path) -> list[str]:
    """Commands in running text and tables: what stands between single back-quotes and starts with one of ours."""
    content = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return [" ".join(found.split()) for found in _INLINE.findall(content)]


def fault(block: Block) -> str | None:
    """What is wrong with a block's marker or language, or None."""
    if block.language not in LANGUAGES:
        return f"{block}: the fence says {block.language!r}; use one of {', '.join(LANGUAGES)}"
    if block.reason is not None and not any(re.fullmatch(known, block.reason) for known in REASONS):
        return f"{block}: not run for an unknown reason, {block.reason!r}"
    if block.marker is not None and block.reason is None and block.file is None:
        return f"{block}: the comment before it, {block.marker!r}, is neither 'not run: REASON' nor 'file: NAME'"
    return None
