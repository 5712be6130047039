"""Code that a forward runs: the names that it looks up, whether a library holds it, whether a user marked it pure."""

from __future__ import annotations

import collections
import dis
import functools
import os
import site
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_COMPUTED = frozenset(("vars", "locals", "__dict__", "__getattribute__", "attrgetter", "methodcaller", "eval", "exec"))
"""Ways to read an attribute without naming it in the code."""


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {*site.getsitepackages(), site.getusersitepackages()}
    # In a checkout this package lies in no such folder; nor do others that were installed editable.
    editable = {
        str(Path(module.__file__).parent) for name in _PACKAGES if (module := sys.modules.get(name)) and module.__file__
    }
    return tuple(os.path.join(folder, "") for folder in sorted(folders | editable))


_PACKAGES = ("disco_accel", "torch", "transformers", "peft", "accelerate", "deepspeed", "numpy", "datasets", "trl")


def is_library(value: types.CodeType | types.FunctionType | type) -> bool:
    """Whether ``value`` is of Python or of an installed package, not of the user's own files."""
    if isinstance(value, type):
        module = sys.modules.get(value.__module__)
        file = getattr(module, "__file__", None)
        return module is None or value.__module__ == "builtins" or (file is not None and _in_library(file))
    code = value if isinstance(value, types.CodeType) else value.__code__
    return _in_library(code.co_filename)


@functools.lru_cache(maxsize=4096)
def _in_library(file: str) -> bool:
    # Graphs of PyTorch's tracer are compiled from text, anew at each trace.
    return file.startswith(("<frozen", "<eval_with_key>", *_library_folders()))


def is_foundation(code: types.CodeType, namespace: dict[str, Any]) -> bool:
    """Whether ``code`` is of Python, PyTorch, their own dependencies or this package, whose globals nobody replaces
    without a setting that is compared by itself. ``namespace``: its globals."""
    file = _file_of(code, namespace)
    return _in_library(file) and file.startswith(_foundation_folders()) and not file.startswith(_layers())


def _file_of(code: types.CodeType, namespace: dict[str, Any]) -> str:
    """Where ``code`` was written; if it was compiled from a string, the file of the module that it runs in."""
    if code.co_filename != "<string>":
        return code.co_filename
    if str(namespace.get("__name__")).startswith("namedtuple_"):
        # Python's own, in a namespace of its own.
        return collections.__file__
    file = namespace.get("__file__")
    return file if isinstance(file, str) else code.co_filename


def is_standard(module: str) -> bool:
    """Whether the module of that name is of Python itself."""
    return module.partition(".")[0] in sys.stdlib_module_names


@functools.cache
def _layers() -> tuple[str, ...]:
    """Folders of PyTorch's own modules, whose functions people do replace, attention's for one."""
    torch = sys.modules.get("torch")
    root = os.path.dirname(torch.__file__) if torch and torch.__file__ else None
    return () if root is None else tuple(os.path.join(root, name, "") for name in ("nn", "ao"))


@functools.cache
def _foundation_folders() -> tuple[str, ...]:
    modules = [module for name in ("disco_accel", "torch", "numpy", "sympy") if (module := sys.modules.get(name))]
    folders = [str(Path(module.__file__).parent) for module in modules if module.__file__]
    standard = sysconfig.get_paths()["stdlib"]
    folders += [os.path.join(standard, name) for name in sys.stdlib_module_names]
    return "<frozen", "<eval_with_key>", *(folder for f in folders for folder in (os.path.join(f, ""), f"{f}.py"))


@functools.lru_cache(maxsize=65536)
def attribute_names(code: types.CodeType) -> frozenset[str] | None:
    """Names that ``code`` may read attributes under: those in it, and strings that could be handed to ``getattr``.

    None for code outside of libraries that reads attributes under names which it computes.
    """
    names = set(code.co_names) | {c for c in _strings(code) if c.isidentifier()}
    if not is_library(code) and (not _COMPUTED.isdisjoint(code.co_names) or _computes_names(code)):
        return None
    return frozenset(names)


def _strings(code: types.CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from (c for c in constant if isinstance(c, str))


def _computes_names(code: types.CodeType) -> bool:
    """Whether a call of getattr or hasattr has no string between the function and the call."""
    waiting = False
    for instruction in dis.get_instructions(code):
        if instruction.argval in ("getattr", "hasattr") and instruction.opname.startswith("LOAD_"):
            waiting = True
        elif waiting and instruction.opname == "LOAD_CONST" and isinstance(instruction.argval, str):
            waiting = False
        elif waiting and (
            instruction.opname.startswith("CALL") or instruction.opname in ("FORMAT_VALUE", "BUILD_STRING")
        ):
            return True
    return False


@functools.lru_cache(maxsize=65536)
def global_names(code: types.CodeType) -> frozenset[str]:
    """Names in ``code``, and in functions written inside it, that may be globals or lie in modules that are."""
    names = {n for n in code.co_names if not n.startswith("__")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= global_names(constant)
    return frozenset(names)


_MARK = "_disco_pure"
_pure_code: set[types.CodeType] = set()


def pure(function: Callable[..., Any]) -> Callable[..., Any]:
    """Say of a hook, or of another function that a forward calls, that nothing is lost if it does not run each step.

    It then runs when a step is captured, on tensors without values. Its changes outside the model are not looked at;
    its changes of the values that pass through it become part of the plan. Returns ``function``.
    """
    target = getattr(function, "__func__", function)
    setattr(target, _MARK, True)
    _pure_code.update(code for part in (target, type(target).__call__) if (code := getattr(part, "__code__", None)))
    return function


def is_pure(code: types.CodeType) -> bool:
    """Whether ``code`` is of a function that was marked with ``pure``."""
    return code in _pure_code


def is_marked(function: Any) -> bool:
    """Whether ``function``, of any kind that can be called, was marked with ``pure``."""
    try:
        # Not by way of a __getattr__ of its class, which may do anything.
        return bool(object.__getattribute__(function, _MARK))
    except AttributeError:
        # A method has no attributes of its own.
        return _MARK in vars(function.__func__) if isinstance(function, types.MethodType) else False
