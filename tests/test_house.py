"""Rules of the house, read off the syntax trees: nothing is unreached, tests lie where their subjects do, and functions
and classes stay small. A list of exceptions may only shrink: an entry that is none any more fails too."""

from __future__ import annotations

import ast
import functools
from collections import Counter

from tests.test_imports import CODE, PACKAGE, ROOT, imports, name_of

ENTRY_POINTS = {
    "disco_accel": "the public names",
    "disco_accel.cli.main": "the console script",
    "disco_accel.autoload": "called at the end of `import torch`",
    "disco_accel.run": "`python -m`, for scripts under a launcher",
    "disco_accel.native.extension": "`python -m`, of `make setup`",
    "disco_accel.testing.pytest_plugin": "`pytest -p`",
}
OWN_FOLDERS = {"benchmarks", "data", "emulated", "gpu", "pages", "public_reports", "quantised", "support"}
"""Folders of tests that mirror none of the package."""
OF_ALL_CODE = {"test_house.py", "test_imports.py", "test_wheel.py"}
"""Flat files of tests whose subject is no single module."""

LINES = 60
LONGER: set[str] = set()
ATTRIBUTES = 15
MORE_ATTRIBUTES = {"Executor", "Lowering", "_Run"}
DOUBLE: set[str] = set()
"""Names of public classes that two modules use."""


@functools.cache
def modules() -> dict[str, ast.Module]:
    """The package's modules by name, the recipes that it links to among them."""
    paths = [*PACKAGE.rglob("*.py"), *(PACKAGE / "recipes").rglob("*.py")]
    return {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


@functools.cache
def named_in(name: str) -> frozenset[str]:
    """What module ``name`` imports, inside functions too, or names as text, as a table of lazy imports does; and its
    package."""
    tree = modules()[name]
    is_package = ROOT.joinpath(*name.split("."), "__init__.py").is_file()
    found = {imported for imported, _ in imports(tree, name, is_package)}
    found |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return frozenset((*found, name.rpartition(".")[0]))


def unreached(entries: list[str]) -> set[str]:
    """The modules of the package that no import reaches from ``entries``, empty packages aside."""
    reached: set[str] = set()
    while entries:
        name = entries.pop()
        if name in modules() and name not in reached:
            reached.add(name)
            entries += named_in(name)
    return {name for name in modules().keys() - reached if len(modules()[name].body) > 1}


def test_every_module_is_reached_from_an_entry_point() -> None:
    assert not unreached(list(ENTRY_POINTS))


def test_an_entry_point_that_is_not_listed_shows() -> None:
    """Planted: without the plugin's name nothing reaches it."""
    rest = [name for name in ENTRY_POINTS if name != "disco_accel.testing.pytest_plugin"]
    assert unreached(rest) == {"disco_accel.testing.pytest_plugin"}


def test_tests_mirror_the_package() -> None:
    """Each folder of code has its folder of tests, each other folder of tests is named here, and a flat file of tests
    is about a flat module."""
    code = {p.name for p in PACKAGE.iterdir() if p.is_dir() and any(f.suffix in (".py", ".cpp") for f in p.rglob("*"))}
    code |= {p.name for p in PACKAGE.iterdir() if p.is_symlink()}
    folders = {p.name for p in (ROOT / "tests").iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders == code | OWN_FOLDERS
    assert not [name for name in code if not any((ROOT / "tests" / name).rglob("test_*.py"))]
    flat = {path.name for path in (ROOT / "tests").glob("test_*.py")} - OF_ALL_CODE
    assert not {name for name in flat if not (PACKAGE / name.removeprefix("test_")).is_file()}
    assert {path.name for path in (ROOT / "tests").glob("*.py")} - flat - OF_ALL_CODE == {"conftest.py"}


def test_no_benchmark_lies_flat() -> None:
    flat = {path.name for path in (ROOT / "benchmarks").iterdir() if path.is_file()}
    assert flat <= {"__init__.py", "__main__.py"}


def test_functions_are_at_most_sixty_lines_long() -> None:
    long = {
        node.name
        for path in CODE
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno >= LINES
    }
    assert long == LONGER


@functools.cache
def classes() -> list[tuple[str, ast.ClassDef]]:
    """The classes of the package, each with its module."""
    own = {name: tree for name, tree in modules().items() if not name.startswith("disco_accel.recipes")}
    return [(name, node) for name, tree in own.items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def test_no_two_public_classes_have_one_name() -> None:
    names = Counter(node.name for _, node in classes() if not node.name.startswith("_"))
    assert {name for name, count in names.items() if count > 1} == DOUBLE


def attributes_of(module: str, node: ast.ClassDef) -> set[str]:
    """What the methods of a class, and of those of the package that it inherits from, assign on ``self``."""
    found = {
        child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store)
        if isinstance(child.value, ast.Name) and child.value.id == "self"
    }
    bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
    for where, other in classes():
        if other.name in bases and (where == module or f"{where}.{other.name}" in named_in(module)):
            found |= attributes_of(where, other)
    return found


def test_no_class_has_more_than_fifteen_attributes() -> None:
    """Fields of dataclasses are data and not counted."""
    assert {node.name for name, node in classes() if len(attributes_of(name, node)) > ATTRIBUTES} == MORE_ATTRIBUTES


def test_few_functions_run_passes() -> None:
    """A captured step runs what it is given and records it; a planner runs what is in front of it. Another caller
    would be one more place that decides which passes run, in which order."""
    calls = [
        name
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and "run_passes" in (getattr(node.func, "id", ""), getattr(node.func, "attr", ""))
    ]
    assert len(calls) <= 4, calls
