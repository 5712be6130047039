"""What is known of a library that packs weights is in its own file: few others name it, in code or in prose."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from disco_accel.quantised.libraries import LIBRARIES

ROOT = Path(__file__).resolve().parents[2]
MOST_FILES = 3
WORDS = {library.name: (library.quant_method or library.name) for library in LIBRARIES}
"""``quanto`` is found in ``optimum-quanto`` too."""


def files_with(word: str) -> list[str]:
    """Modules of the package and the recipes with ``word`` in them, in any case."""
    pattern = re.compile(rf"(?<![a-z]){re.escape(word)}", re.IGNORECASE)
    paths = sorted((ROOT / "disco_accel").rglob("*.py")) + sorted((ROOT / "recipes").rglob("*.py"))
    return [str(p.relative_to(ROOT)) for p in paths if pattern.search(p.read_text(encoding="utf-8"))]


def test_every_library_is_counted() -> None:
    assert set(WORDS.values()) == {"bitsandbytes", "torchao", "hqq", "quanto"}


@pytest.mark.parametrize("word", WORDS.values())
def test_few_files_name_a_library(word: str) -> None:
    found = files_with(word)
    assert f"disco_accel/quantised/{word}.py" in found
    assert len(found) <= MOST_FILES, found
