"""Rules of the house, read off the syntax trees: nothing is unreached, tests lie where their subjects do, and functions
and classes stay small and few."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.emulated.mutant_list import MUTANTS
from tests.test_imports import CODE, PACKAGE, ROOT, imports, name_of, parsed

ENTRY_POINTS = {
    "disco_accel.fuse.compiler": "the process that compiles fused kernels",
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
ATTRIBUTES = 15
PUBLIC_CLASSES = 300


@pytest.fixture(autouse=True, scope="module")
def trees_are_let_go() -> Iterator[None]:
    """Every later search for garbage would walk them."""
    yield
    for made in (parsed, modules, classes):
        made.cache_clear()


@functools.cache
def modules() -> dict[str, ast.Module]:
    """The package's modules by name, the recipes that it links to among them."""
    paths = [*PACKAGE.rglob("*.py"), *(PACKAGE / "recipes").rglob("*.py")]
    return {name_of(path): parsed(path) for path in paths}


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
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno >= LINES
    }
    assert not long


@functools.cache
def classes() -> list[tuple[str, ast.ClassDef]]:
    """The classes of the package, each with its module."""
    own = {name: tree for name, tree in modules().items() if not name.startswith("disco_accel.recipes")}
    return [(name, node) for name, tree in own.items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def test_public_classes_are_few_and_no_two_have_one_name() -> None:
    names = Counter(node.name for _, node in classes() if not node.name.startswith("_"))
    assert not {name for name, count in names.items() if count > 1}
    assert len(names) <= PUBLIC_CLASSES, len(names)


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
    assert not {node.name for name, node in classes() if len(attributes_of(name, node)) > ATTRIBUTES}


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


KINDS = {
    "threading": {
        **{"Lock": "lock", "RLock": "reentrant lock", "Condition": "condition", "Event": "event"},
        **{"Semaphore": "semaphore", "BoundedSemaphore": "semaphore", "Barrier": "barrier"},
        **{"Thread": "thread", "Timer": "thread", "local": "thread-local"},
    },
    "disco_accel.threads": {"start_thread": "thread"},
    "concurrent.futures": {"ThreadPoolExecutor": "pool", "ProcessPoolExecutor": "pool"},
    "multiprocessing": {"Process": "process", "Pool": "pool", "Lock": "lock"},
    "fcntl": {"flock": "file lock"},
    "weakref": {
        **{"ref": "weak reference", "proxy": "weak reference", "WeakMethod": "weak method", "WeakSet": "weak set"},
        **{"WeakKeyDictionary": "weak keys", "WeakValueDictionary": "weak values", "finalize": "finalizer"},
    },
    "torch.multiprocessing.reductions": {"StorageWeakRef": "weak reference"},
}
"""Of classes and functions, by their modules: their names on docs/concurrency.md."""
NATIVE = re.compile(
    r"(?:std::|pthread_|Fork)((?i:mutex)|condition_variable|thread)(?:_t|(?<=thread)>)? (\w+)(?:;| =)"
    r"|(\w+) = new std::(mutex);"
)
ROW = re.compile(r"^\| `\w+`: (`.+?`) \| ([a-z_ -]+) \|", re.MULTILINE)


def concurrency(tree: ast.Module) -> set[tuple[str, str]]:
    """Locks, threads and weak references that a module makes: name and kind of each. An attribute's name begins with
    its class; another's with its functions, and ends there where no variable holds it."""
    kinds = {f"{module}.{name}": kind for module, names in KINDS.items() for name, kind in names.items()}
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imported |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            imported |= {name.asname: name.name for name in node.names if name.asname}
    found: set[tuple[str, str]] = set()

    def visit(node: ast.AST, scope: tuple[str, ...], owner: str) -> None:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            scope, owner = (*scope, node.name), ""
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for one, value in zip(target.elts, node.value.elts, strict=False):
                    visit(value, scope, ast.unparse(one).partition("[")[0])
                return
            owner = ast.unparse(target).partition("[")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) != "isinstance":
            own = (scope[0], owner[5:]) if owner.startswith("self.") else (*scope, "" if "(" in owner else owner)
            for part in (node.func, *node.args, *(keyword.value for keyword in node.keywords)):
                first, dot, rest = ast.unparse(part).partition(".")
                if kind := kinds.get(imported.get(first, first) + dot + rest):
                    found.add((".".join(filter(None, own)), kind))
        for child in ast.iter_child_nodes(node):
            visit(child, scope, owner)

    visit(tree, (), "")
    return found


def unexplained(page: str, trees: Iterable[ast.Module], sources: Iterable[str]) -> tuple[Counter[Any], Counter[Any]]:
    """What modules and C++ sources make that has no row on ``page``, and rows of what nobody makes."""
    made = Counter(one for tree in trees for one in concurrency(tree))
    native = (found for text in sources for found in NATIVE.findall(text))
    made.update((name or pointer, kind.lower() or other) for kind, name, pointer, other in native)
    rows = ((name, row[2]) for row in ROW.finditer(page) for name in row[1].strip("`").split("`, `"))
    told = Counter((name.rpartition("::")[2], kind) for name, kind in rows)
    return made - told, told - made


def test_each_lock_thread_and_weak_reference_has_its_reason_on_a_page() -> None:
    """Planted: a lock and a thread of C++ without a row, a row of a set that is gone, and one of another kind."""
    page = (ROOT / "docs" / "concurrency.md").read_text(encoding="utf-8")
    native = [p for p in (ROOT / "runtime_ext").rglob("*") if p.suffix in (".cpp", ".h") and "tests" not in p.parts]
    sources = [path.read_text(encoding="utf-8") for path in native]
    assert unexplained(page, modules().values(), sources) == (Counter(), Counter())
    code = "from threading import Lock as L\nclass A:\n def f(self):\n  self._a, self.b = L(), weakref.ref(self)"
    rows = "| `a`: `A.b` | weak reference | x | y |\n| `a`: `A._a`, `A.c` | weak set | x | y |"
    missing = {("A._a", "lock"): 1, ("all_", "thread"): 1}
    found = unexplained(rows, [ast.parse(code)], ["std::vector<std::thread> all_;"])
    assert found == (missing, {("A._a", "weak set"): 1, ("A.c", "weak set"): 1})


def test_each_fault_that_is_planted_on_an_emulated_gpu_has_its_place_in_the_code() -> None:
    """A text that has changed would be told by a run of the faults alone, which takes half an hour."""
    texts = [(m.name, file, old) for m in MUTANTS for file, old, _ in ((m.file, m.old, m.new), *m.also)]
    stale = [(name, file) for name, file, old in texts if (ROOT / file).read_text(encoding="utf-8").count(old) != 1]
    assert texts and not stale
