"""Imports point one way along the pipeline, and nothing can run code that it was handed as data. Checked on the syntax
trees, so that lazy imports inside functions count too."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "disco_accel"
CODE = sorted(p for folder in ("disco_accel", "recipes", "benchmarks") for p in (ROOT / folder).rglob("*.py"))

TORCH_FREE = (
    "config",
    "errors",
    "eviction",
    "gc_pause",
    "graph",
    "host_limits",
    "native.cuda_headers",
    "native.device_types",
    "native.library_file",
    "native.plain_library",
    "plan",
    "quantised.forms",
    "shortage",
    "simulate",
    "sizes",
    "store.connection",
    "store.server",
    "store.store_command",
    "threads",
    "verify",
    "version",
)

HUGGING_FACE = ("accelerate", "deepspeed", "peft", "transformers")
MAY_USE_HUGGING_FACE = ("disco_accel.integrate", "recipes", "benchmarks")

# Each part of the pipeline and what it may import of ours, from the first stage to the last. The modules at the top are
# open to all, and import nothing but each other.
OPEN = ("errors", "eviction", "gc_pause", "host_limits", "shortage", "sizes", "threads", "version")
MAY_IMPORT = {
    "graph": (),
    "verify": ("graph",),
    "simulate": ("graph",),
    "native": ("graph", "simulate"),
    "store": ("native",),
    "plan": ("graph", "native", "simulate", "verify"),
    "config": ("graph", "native", "plan"),
    "quantised": ("graph", "native"),
    "capture": ("graph", "native", "quantised"),
    "fuse": ("graph", "native"),
    "measure": ("graph", "native", "simulate", "quantised", "fuse"),
    "decompose": ("graph", "native", "simulate", "plan", "capture"),
    "execute": ("graph", "native", "measure"),
    "observe": ("config", "graph", "native", "plan", "simulate"),
    "selfcheck": ("config", "graph", "native", "capture", "measure", "plan", "verify", "execute"),
    "step": (
        *("config", "graph", "native", "capture", "measure", "simulate", "plan", "verify", "execute", "observe"),
        *("decompose", "quantised", "selfcheck", "store"),
    ),
    "integrate": (
        *("config", "graph", "native", "quantised", "capture", "measure", "execute", "observe", "selfcheck", "step"),
    ),
}
STEP_OPEN = ("capture_lock", "dynamo", "optimizer_home")
STEP_MAY_IMPORT = {
    "state": (),
    "placement": ("state",),
    "compile": ("placement",),
    "gradients": ("placement", "compile"),
    "update": ("placement", "compile", "gradients"),
    "budget": ("placement", "compile", "gradients", "update"),
    "run": ("state", "placement", "compile", "gradients", "update", "budget"),
}
"""Rooms of ``step``, and the flat modules there that are open to all of them and import nothing of ``step``."""

STORE_DOORS = {"step": ("shared_budgets",), "cli": ("store_command",)}
"""Modules of the store that a part may import; others may import none."""

DYNAMIC = ("importlib.import_module", "__import__")
FORBIDDEN_MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve")
FORBIDDEN_CALLS = ("eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "numpy.load")
READS_ENVIRONMENT = {
    "disco_accel.config.settings": "our own variables, a launcher's, accelerate's",
    "disco_accel.config.machine_devices": "which GPUs a process sees, and where the processes of a run meet",
    "disco_accel.config.hf_environment": "a switch of transformers' loader",
    "disco_accel.native.extension": "the compiler's",
    "disco_accel.native.arithmetic": "those by which libraries choose their code",
    "disco_accel.fuse.kernels": "the compiler's, as a fact of kernels on disk",
    "disco_accel.fuse.compiler_process": "those of the compilers that it starts",
    "disco_accel.store.store_command": "that of the programs that it starts",
    "disco_accel.store.cuda_tier": "whether the first visible GPU is the machine's first",
    "disco_accel.store.socket_path": "where a store listens, the folder of a user's sockets",
    "disco_accel.native.plain_library": "the compiler's, where libraries are kept, whether to build them",
}
"""Module → whose variables it reads or sets."""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, module: str, is_package: bool = False) -> Iterator[tuple[str, int]]:
    """Every module that ``tree`` imports, absolute, with its line; ``from a import b`` gives a.b too: it may be one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*parent, *([base] if base else [])])
            yield base, node.lineno
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func) in DYNAMIC and isinstance(node.args[0], ast.Constant):
            yield str(node.args[0].value), node.lineno


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def type_checking_removed(tree: ast.Module) -> ast.Module:
    class Remove(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if dotted(node.test).endswith("TYPE_CHECKING") else self.generic_visit(node)

    return Remove().visit(tree)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imported_by(path: Path) -> tuple[tuple[str, int], ...]:
    tree = type_checking_removed(ast.parse(path.read_text(encoding="utf-8")))
    return tuple(imports(tree, name_of(path), path.name == "__init__.py"))


def faults(path: Path, refuse: tuple[str, ...]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}" for name, line in imported_by(path) if within(name, refuse)
    ]


@pytest.fixture(autouse=True, scope="module")
def trees_are_let_go() -> Iterator[None]:
    """Every later search for garbage would walk them."""
    yield
    parsed.cache_clear()


def test_torch_free_modules_import_no_torch() -> None:
    wrong: list[str] = []
    for path in CODE:
        short = name_of(path).removeprefix("disco_accel.")
        if within(short, TORCH_FREE):
            wrong += faults(path, ("torch", *HUGGING_FACE))
    assert not wrong


def test_the_torch_free_part_loads_without_torch() -> None:
    """Also what those modules import in turn: torch is made unimportable, and all of them must load."""
    there = [name_of(p) for p in CODE if within(name_of(p).removeprefix("disco_accel."), TORCH_FREE)]
    assert "disco_accel.config.settings" in there and "disco_accel.graph.taskgraph" in there
    program = f"import sys\nsys.modules['torch'] = None\nfor name in {there!r}:\n    __import__(name)\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=1500, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_only_integrate_and_the_recipes_import_hugging_face_libraries() -> None:
    wrong = [fault for p in CODE if not within(name_of(p), MAY_USE_HUGGING_FACE) for fault in faults(p, HUGGING_FACE)]
    assert not wrong


def imported_from_elsewhere(paths: Iterable[Path], house: str, allowed: Iterable[str]) -> list[str]:
    """Imports of modules of the package ``house`` that are not within its ``allowed`` packages."""
    allowed = tuple(f"{house}.{name}" for name in allowed)
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted(paths)
        for name, line in imported_by(path)
        if name.startswith(f"{house}.") and is_module(name) and not within(name, allowed)
    ]


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_a_part_imports_only_what_comes_before_it(part: str) -> None:
    paths = (PACKAGE / part).rglob("*.py")
    assert not imported_from_elsewhere(paths, "disco_accel", (part, *MAY_IMPORT[part], *OPEN))


@pytest.mark.parametrize("room", STEP_MAY_IMPORT)
def test_a_room_of_step_imports_only_what_comes_before_it(room: str) -> None:
    paths = (PACKAGE / "step" / room).rglob("*.py")
    assert not imported_from_elsewhere(paths, "disco_accel.step", (room, *STEP_MAY_IMPORT[room], *STEP_OPEN))


def test_every_module_of_step_is_in_a_room_or_open_to_all_rooms() -> None:
    folder = PACKAGE / "step"
    assert {path.parent.name for path in folder.glob("*/__init__.py")} == STEP_MAY_IMPORT.keys()
    assert {path.stem for path in folder.glob("*.py")} == {"__init__", *STEP_OPEN}
    assert not imported_from_elsewhere(folder.glob("*.py"), "disco_accel.step", ())
    order = list(STEP_MAY_IMPORT)
    assert all(order.index(before) < order.index(room) for room in order for before in STEP_MAY_IMPORT[room])


@pytest.mark.parametrize("part", sorted({*MAY_IMPORT, "autoload", "cli", "testing"} - {"store"}))
def test_a_part_imports_its_door_of_the_store_alone(part: str) -> None:
    paths = (PACKAGE / part).rglob("*.py")
    assert not imported_from_elsewhere(paths, "disco_accel.store", STORE_DOORS.get(part, ()))


def test_every_part_has_its_place_in_that_order() -> None:
    parts = {path.name for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    # Those at the end of the pipeline may import all of it; links to other folders are no parts.
    assert parts - {path.name for path in PACKAGE.iterdir() if path.is_symlink()} == {
        *MAY_IMPORT,
        "autoload",
        "cli",
        "testing",
    }
    order = list(MAY_IMPORT)
    assert all(order.index(before) < order.index(part) for part in order for before in MAY_IMPORT[part])


def test_what_is_open_to_all_imports_nothing_else() -> None:
    allowed = tuple(f"disco_accel.{name}" for name in OPEN)
    wrong = [
        f"{name}: {n}"
        for name in OPEN
        for n, _ in imported_by(PACKAGE / f"{name}.py")
        if is_module(n) and not within(n, allowed)
    ]
    assert not wrong


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for types alone and inside functions count too."""
    edges = {
        name_of(path): {name for name, _ in imports(parsed(path), name_of(path), path.name == "__init__.py")}
        for path in CODE
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for name in sorted(edges[module] & edges.keys() - {module}):
                visit(name, (*path, module))
            done.add(module)

    for module in edges:
        visit(module, ())


def test_no_two_modules_have_one_name() -> None:
    names = [path.stem for path in PACKAGE.rglob("*.py") if path.stem != "__init__"]
    assert not {name for name in names if names.count(name) > 1}


def is_module(name: str) -> bool:
    """Whether ``name`` is a module or package of ours below the top one (not a name inside a module)."""
    if not name.startswith("disco_accel."):
        return False
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def test_nothing_runs_code_from_data() -> None:
    wrong = [fault for path in CODE for fault in faults(path, FORBIDDEN_MODULES)]
    for path in CODE:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and dotted(node.func) in FORBIDDEN_CALLS:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} calls {dotted(node.func)}")
    assert not wrong


def test_only_the_modules_named_here_read_the_environment() -> None:
    """Each of them does: a name that is no longer needed goes."""
    reading: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Attribute) and dotted(node) in ("os.environ", "os.getenv"):
                found = f"{path.relative_to(ROOT)}:{node.lineno} reads {dotted(node)}"
                reading.setdefault(name_of(path), []).append(found)
    assert not {name: found for name, found in reading.items() if name not in READS_ENVIRONMENT}
    assert reading.keys() == READS_ENVIRONMENT.keys()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.nn", "torch.nn"),
        ("def f():\n    from torch import nn", "torch"),
        ("from ...execute import executor", "disco_accel.execute.executor"),
        ("from . import sim_malloc", "disco_accel.plan.buildmemgraph.sim_malloc"),
        ("import importlib\nimportlib.import_module('torch')", "torch"),
        ("from disco_accel import integrate", "disco_accel.integrate"),
    ],
)
def test_the_checker_sees_every_way_to_import(source: str, found: str) -> None:
    assert found in [name for name, _ in imports(ast.parse(source), "disco_accel.plan.buildmemgraph.builder")]


def test_the_checker_skips_imports_for_types_alone() -> None:
    tree = type_checking_removed(ast.parse("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"))
    assert "torch" not in [name for name, _ in imports(tree, "disco_accel.plan.buildmemgraph.builder")]
