"""Sentences of pages and docstrings, and three counts of them: noun clauses, long sentences, private verbs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

LONGEST = 35
"""Words of a sentence."""

_FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_WRITTEN = re.compile(r"<!-- (?!end of |not run|file: )(.+?) -->.*?<!-- end of \1 -->", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_CODE = re.compile(r"``.+?``|`[^`]+`", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_ITEM = re.compile(r"^ *(?:[-*] |\d+\. |\[\^\w+\]: )")
_END = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[\"'(*\[]*[A-Z0-9])")
_WORD = re.compile(r"[A-Za-z0-9][\w'./%+-]*")

_PERSON = r"(?:those|people|users?|readers?|(?:any|every|some|no)(?:one|body)|(?:an?|the|each|every|any|no) \w+)"
_CLAUSE = re.compile(r"\b(?:what|whatever|who|whoever)\b", re.IGNORECASE)
_AFTER_A_PERSON = re.compile(rf"\b{_PERSON},? $", re.IGNORECASE)
_LABEL = 5
"""Words of a name that may begin with "what": the head of a column, the title of a list."""

_PRIVATE = re.compile(
    r"\b(?:put(?:s|ting)?(?: \w+)? off|let(?:s|ting)?(?: \w+)? (?:go|be)|(?:com(?:e|es|ing)|came) down|"
    r"(?:stand(?:s|ing)?|stood) in|deal(?:s|t|ing)?(?: \w+)? out)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Sentence:
    """``words`` counts a piece of code as one; ``tabular`` marks a cell of a table."""

    text: str
    words: int
    tabular: bool = False

    @property
    def clauses(self) -> int:
        """Clauses with what, who, whatever or whoever in a noun's place: not in a question or a name, nor a "who"
        behind its person."""
        if self.text.rstrip("\"')*").endswith("?") or self.words <= _LABEL:
            return 0
        found = _CLAUSE.finditer(self.text)
        return sum(m[0].lower() != "who" or not _AFTER_A_PERSON.search(self.text[: m.start()]) for m in found)

    @property
    def long(self) -> bool:
        return not self.tabular and self.words > LONGEST

    @property
    def private_verbs(self) -> int:
        return len(_PRIVATE.findall(self.text))


def sentences(text: str) -> list[Sentence]:
    """The sentences of Markdown or of a docstring; headings, code blocks, comments, and parts that a program
    writes, between ``<!-- X -->`` and ``<!-- end of X -->``, are none."""
    text = _LINK.sub(
        lambda link: link[1][:1].upper() + link[1][1:],
        _CODE.sub("Code", _COMMENT.sub("", _WRITTEN.sub("", _FENCE.sub("\n", text)))),
    )
    return [
        Sentence(part, len(_WORD.findall(part)), tabular)
        for block, tabular in _blocks(text)
        for part in _END.split(block)
        if _WORD.search(part)
    ]


def _blocks(text: str) -> Iterator[tuple[str, bool]]:
    """Paragraphs and items of lists, each as one line, and cells of tables."""
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        table, heading = line.lstrip().startswith("|"), line.startswith("#")
        if lines and (table or heading or not line.strip() or _ITEM.match(line)):
            yield " ".join(lines), False
            lines = []
        if table:
            yield from ((cell.strip(), True) for cell in line.strip(" |").split("|"))
        elif line.strip() and not heading:
            lines.append(_ITEM.sub("", line).strip())


def docstrings(path: Path) -> list[str]:
    """Those of a module, its classes, functions and attributes."""
    return list(_texts(ast.parse(path.read_text(encoding="utf-8")).body))


def _texts(statements: Iterable[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        if isinstance(statement, ast.Expr):
            if isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
                yield statement.value.value
        elif isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.If):
            yield from _texts(statement.body)


def counts(found: list[Sentence]) -> tuple[int, int, int]:
    """Clauses, long sentences, private verbs."""
    return sum(s.clauses for s in found), sum(s.long for s in found), sum(s.private_verbs for s in found)
