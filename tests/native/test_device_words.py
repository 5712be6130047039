"""The kind of a device is a question for its backend: few files outside of ``native`` name CUDA or compare kinds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "disco_accel"
MOST_FILES = 3


def device_words(tree: ast.AST) -> Iterator[int]:
    """Lines with CUDA's name as a value, with ``.cuda`` or ``.is_cuda``, or that compare the ``.type`` of something."""
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(word)) if word == "cuda" or word.startswith("cuda:"):
                yield node.lineno
            case ast.Attribute(attr="cuda" | "is_cuda"):
                yield node.lineno
            case ast.Compare(left=left, comparators=others):
                if any(isinstance(side, ast.Attribute) and side.attr == "type" for side in (left, *others)):
                    yield node.lineno


def test_few_files_outside_native_name_a_kind_of_device() -> None:
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != "native"
        and (lines := sorted(set(device_words(ast.parse(path.read_text(encoding="utf-8"))))))
    }
    assert len(found) <= MOST_FILES, found


@pytest.mark.parametrize(
    "source",
    [
        "torch.cuda.synchronize()",
        'x.to("cuda:1")',
        'if kind == "cuda": pass',
        "t.is_cuda",
        'd.type != "cpu"',
        "t.cuda()",
    ],
)
def test_each_way_to_name_one_is_seen(source: str) -> None:
    assert list(device_words(ast.parse(source)))


@pytest.mark.parametrize("source", ['"""Of cuda devices."""', "error.type", 'name = "cuda_lane"', 'device == "cpu"'])
def test_words_of_the_documentation_and_names_are_none(source: str) -> None:
    assert not list(device_words(ast.parse(source)))
