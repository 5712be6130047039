"""Pages and docstrings are plain sentences: nouns in a noun's place, at most 35 words, no private verbs."""

from __future__ import annotations

import functools

import pytest

from tests.pages.prose import Sentence, counts, docstrings, sentences
from tests.test_imports import PACKAGE, ROOT

PER_THOUSAND = 2
"""Noun clauses in a thousand words of a page."""

FOLDERS = sorted({path.parent.relative_to(PACKAGE).parts[:1] for path in PACKAGE.rglob("*.py")})


def pages() -> list[str]:
    """The pages at the top, those of ``docs``, and the READMEs of the package's folders."""
    found = (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *PACKAGE.rglob("README.md"))
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


@functools.cache
def of_page(page: str) -> list[Sentence]:
    return sentences((ROOT / page).read_text(encoding="utf-8"))


def within_limits(found: list[Sentence]) -> bool:
    clauses, *others = counts(found)
    return clauses * 1000 <= PER_THOUSAND * sum(sentence.words for sentence in found) and not any(others)


def told(found: list[Sentence]) -> str:
    """The sentences of ``found`` that count."""
    return "\n".join(s.text for s in found if s.clauses or s.long or s.private_verbs)


@pytest.mark.parametrize("page", pages())
def test_a_page_is_within_the_limits(page: str) -> None:
    assert within_limits(of_page(page)), told(of_page(page))


@pytest.mark.parametrize("folder", FOLDERS, ids="/".join)
def test_docstrings_of_a_folder_are_within_the_limits(folder: tuple[str, ...]) -> None:
    files = PACKAGE.joinpath(*folder).rglob("*.py") if folder else PACKAGE.glob("*.py")
    found = [sentence for path in sorted(files) for text in docstrings(path) for sentence in sentences(text)]
    assert within_limits(found), told(found)


LONG = "The engine runs " + "the kernel and " * 11 + "the copy."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The plan keeps what the loss reads.", (1, 0, 0)),
        ("What the forward\nreturns waits for the update.", (1, 0, 0)),
        ("- A lease ends when who holds it ends, whatever its state.", (2, 0, 0)),
        ("| value | it is good for whoever reads it next in the step |", (1, 0, 0)),
        ("`what` is code. [It says what](x.md) a link leads to.", (1, 0, 0)),
        (LONG, (0, 1, 0)),
        (LONG.replace(" and the copy.", ".\n\nThe copy."), (0, 0, 0)),
        (f"| {LONG} |", (0, 0, 0)),
        ("An update that is put off stands in for the step.", (0, 0, 2)),
        ("Jobs come down, letting memory go, and the layers dealt out are let be.", (0, 0, 4)),
    ],
)
def test_a_planted_sentence_counts(text: str, expected: tuple[int, int, int]) -> None:
    assert counts(sentences(text)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "What does the plan keep between two uses of a weight?",
        "What is live",
        "# What the plan keeps until the loss has read it",
        "| what happens | effect |\n|---|---|",
        "A user who trains a model reads its report, and those who measure the engine do too.",
        "```text\nprints what it likes\n```",
        "<!-- results -->\nPrints what it likes.\n<!-- end of results -->",
        "The store puts an object off-device, lets a client read it, and goes on.",
        "A stand-in for CUDA. The offset is somewhat larger, and the loss goes down.",
    ],
)
def test_a_good_sentence_does_not_count(text: str) -> None:
    assert counts(sentences(text)) == (0, 0, 0)


def test_sentences_end_where_a_reader_ends_them() -> None:
    found = sentences("It takes 0.5 s, half. `x.py` is next, then\n  a line. [a.md](a.md) is a link.\n- An item.\n")
    assert [sentence.text for sentence in found] == [
        "It takes 0.5 s, half.",
        "Code is next, then a line.",
        "A.md is a link.",
        "An item.",
    ]
