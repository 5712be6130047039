"""Classes of ``step`` are small and have names of their own, functions are short. Checked on the syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.test_imports import PACKAGE

MOST_ATTRIBUTES, MOST_LINES = 15, 60
FILES = sorted(path for path in PACKAGE.rglob("*.py") if not {"recipes", "runtime_ext"} & set(path.parts))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """All of the package, with the folder in it that they are in."""
    for path, tree in TREES.items():
        parts = path.relative_to(PACKAGE).parts
        yield from ((parts[0], node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def attributes(of: ast.ClassDef) -> set[str]:
    """Names that its methods assign to on their first argument."""
    found = set[str]()
    for method in (node for node in of.body if isinstance(node, ast.FunctionDef) and node.args.args):
        own = method.args.args[0].arg
        for node in ast.walk(method):
            written = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if written and isinstance(node.value, ast.Name) and node.value.id == own:
                found.add(node.attr)
    return found


def test_no_class_of_step_has_many_attributes() -> None:
    counts = {node.name: len(attributes(node)) for folder, node in classes() if folder == "step"}
    assert counts["Session"] > 5, "they are counted"
    assert not {name: count for name, count in counts.items() if count > MOST_ATTRIBUTES}


def test_classes_of_step_have_names_of_their_own() -> None:
    names = [node.name for _, node in classes()]
    own = {node.name for folder, node in classes() if folder == "step"}
    assert not {name for name in own if names.count(name) > 1}


def test_functions_of_step_are_short() -> None:
    functions = [
        node
        for path, tree in TREES.items()
        if path.relative_to(PACKAGE).parts[0] == "step"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert not {f.name: n for f in functions if (n := (f.end_lineno or 0) - f.lineno + 1) > MOST_LINES}
