"""The walk from a model's modules to every container of Python state that their forwards can read."""

from __future__ import annotations

import array
import collections
import functools
import gc
import random
import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from disco_accel.capture.parts import leaves
from disco_accel.errors import CaptureError
from disco_accel.native.change_watch import ABSENT, ANYTHING, Kind
from disco_accel.step.state.containers import (
    ATOMS,
    CLASS_NOTES,
    HOOKS,
    PLAIN,
    Container,
    below,
    content_of,
    identity,
    masked,
    own_attribute,
    own_attributes,
    plain_text,
)
from disco_accel.step.state.forward_code import global_names, is_library, is_marked, is_standard

MAX_CONTAINERS = 200_000
"""A 70B model with adapters has about 60,000; beyond this something else hangs on the model, such as a data set."""

_UNREAD_CONTAINERS = 20_000
"""Of these and twenty for each module, all are looked at before it is known which a forward reads: a second or two."""

_SIMPLE = (*PLAIN, *ATOMS)
_PLAIN_TYPES = frozenset(PLAIN)
_COLLECTIONS = (set, collections.deque, bytearray, array.array)
_REPORTERS = (
    *("aim", "clearml", "comet_ml", "coverage", "dvclive", "mlflow", "neptune", "rich", "sentry_sdk", "swanlab"),
    *("tensorboard", "tensorboardX", "tqdm", "trackio", "wandb"),
)
"""Packages that show or send results of others: trackers, progress bars, monitors."""
_OPAQUE = frozenset(
    [
        *_REPORTERS,
        *("abc", "asyncio", "builtins", "concurrent", "contextvars", "ctypes", "dataclasses", "importlib"),
        *("inspect", "io", "logging", "multiprocessing", "numpy", "operator", "optimum", "os", "pathlib"),
        *("re", "safetensors", "select", "socket", "ssl", "subprocess", "sys", "tempfile", "threading"),
        *("tokenizers", "torch", "typing", "weakref", "_io", "_thread", "_weakref"),
    ]
)
"""Packages whose objects are compared by identity alone: nothing that a forward computes with changes inside them."""

_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


class Walk:
    """All state that a walk from the modules of ``model`` meets. ``names``: of the attributes of modules that count;
    None = all. ``executed``: code that has run, whose globals count too.

    Raises:
        CaptureError: more than ``MAX_CONTAINERS`` hang on the model, among attributes that its forward reads.
    """

    def __init__(self, model: torch.nn.Module, names: frozenset[str] | None, executed: Iterable[Any]) -> None:
        self.containers: list[Container] = []
        self.generators: list[Any] = []
        """Generators of random numbers, of Python's and numpy's classes."""
        self.tensors: list[torch.Tensor] = []
        self.arrays: list[np.ndarray[Any, Any]] = []
        self.functions: list[str] = []
        """Functions, by value."""
        self.slots: list[tuple[Any, str, Any]] = []
        """Objects, names of their slots, and the values in these."""
        self._names = names
        self._memo: dict[int, str] = {}
        self._named: set[tuple[int, str]] = set()
        self._queue: collections.deque[Callable[[], None]] = collections.deque()
        unread = _UNREAD_CONTAINERS + 20 * sum(1 for _ in model.modules())
        self._most = MAX_CONTAINERS if names is not None else min(unread, MAX_CONTAINERS)
        self._walk(model, executed)

    def _walk(self, model: torch.nn.Module, executed: Iterable[Any]) -> None:
        for name, module in model.named_modules():
            self.describe(module, name or "the model")
        for name in _GLOBAL_HOOKS:
            self.describe(getattr(torch_module, name), f"torch.nn.modules.module.{name}")
        self._drain()
        by_globals: dict[int, tuple[dict[str, Any], set[str]]] = {}
        for code, namespace in executed:
            by_globals.setdefault(id(namespace), (namespace, set()))[1].update(global_names(code))
        for namespace, names in by_globals.values():
            self._names_of(namespace, names, str(namespace.get("__name__", "?")))
        self._drain()

    def _drain(self) -> None:
        while self._queue:
            if len(self.containers) > self._most:
                self._queue.clear()
                if self._names is not None:
                    raise CaptureError(
                        f"{self.containers[-1].where}: more than {MAX_CONTAINERS} Python objects hang on the model and "
                        "its forward reads some of them; keep data sets and the like outside of the model"
                    )
                return
            self._queue.popleft()()

    def describe(self, value: Any, where: str) -> str:
        """The value's share of the digest; containers that it leads to are queued."""
        if type(value) in _PLAIN_TYPES or isinstance(value, _SIMPLE):
            return plain_text(value)
        known = self._memo.get(id(value))
        if known is not None:
            return known
        if isinstance(value, (tuple, frozenset)):
            items = [self.describe(item, where) for item in value]
            return f"{type(value).__name__}({','.join(items if isinstance(value, tuple) else sorted(items))})"
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)) and is_marked(value):
            return f"pure {identity(getattr(value, '__func__', value))}"
        if isinstance(value, types.MethodType):
            return f"method({self.describe(value.__func__, where)},{self.describe(value.__self__, where)})"
        if isinstance(value, functools.partial):
            parts = (self.describe(part, where) for part in (value.func, value.args, value.keywords))
            return f"partial({','.join(parts)})"
        if isinstance(value, (list, dict, *_COLLECTIONS)):
            text = self._memo[id(value)] = f"@{len(self._memo)}"
            kind = Kind.LIST if isinstance(value, list) else Kind.DICT if isinstance(value, dict) else Kind.EQUAL
            self._queue.append(lambda: self._add(kind, value, where))
            if own_attributes(value):
                # A subclass may keep more than its items.
                self._queue.append(lambda: self._add(Kind.ATTRIBUTES, value, where))
            return text
        if isinstance(value, (property, staticmethod, classmethod)):
            inner = (value.fget, value.fset) if isinstance(value, property) else (value.__func__,)
            return f"{type(value).__name__}({','.join(self.describe(part, where) for part in inner)})"
        return self._describe_object(value, where)

    def _describe_object(self, value: Any, where: str) -> str:
        text = self._memo[id(value)] = f"{type(value).__name__} {_number_of(value)}"
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
                # Of a quantised weight: its inner tensors, or the object that holds its scales.
                self._queue.append(lambda: self._add(Kind.ATTRIBUTES, value, where))
        elif isinstance(value, np.ndarray):
            self.arrays.append(value)
        elif _is_generator(value):
            self.generators.append(value)
        elif isinstance(value, types.FunctionType):
            # Equal functions are equal: libraries take hooks off for a while and make the same ones anew.
            text = self._memo[id(value)] = f"function {len(self._memo)}"
            self._queue.append(lambda: self._add_function(value, where, text))
        elif isinstance(value, RemovableHandle):
            text = self._memo[id(value)] = "handle of a hook"
        elif isinstance(value, type):
            if not _is_opaque(value) or issubclass(value, torch.nn.Module):
                self._queue.append(lambda: self._add_class(value))
        elif is_marked(value) and not isinstance(value, torch.nn.Module):
            pass
        elif isinstance(value, torch.nn.Module) or not _is_opaque(type(value)):
            text = self._memo[id(value)] = f"object {len(self._memo)} {self._class_chain(type(value))}"
            self._queue.append(lambda: self._add_object(value, where))
        return text

    def _class_chain(self, kind: type) -> str:
        return ",".join(self.describe(k, k.__qualname__) for k in kind.__mro__ if k is not object)

    def _add(self, kind: Kind, owner: Any, where: str) -> None:
        container = Container(kind, owner, where, [], "")
        content = content_of(container)
        container.snapshot = masked(container, content, self._names)
        if kind is Kind.EQUAL:
            items = [self.describe(item, where) for item in content[0]]
            parts = sorted(items) if isinstance(owner, set) else items
        elif kind in (Kind.LIST, Kind.CELL):
            parts = [self.describe(v, where) if v is not ABSENT else "absent" for v in content]
        else:
            pairs = zip(content[::2], container.snapshot[1::2], strict=True)
            parts = [f"{self.describe(k, where)}:{self._entry(container, k, v)}" for k, v in pairs if v is not ANYTHING]
        container.part = f"{kind.name}({';'.join(parts)})"
        self.containers.append(container)

    def _entry(self, container: Container, key: Any, value: Any) -> str:
        if value is ABSENT:
            return "absent"
        # Most entries are plain or were met before: no name is made for those.
        if type(value) in _PLAIN_TYPES:
            return plain_text(value)
        known = self._memo.get(id(value))
        if known is not None:
            return known
        owner, where = container.owner, below(container, key)
        of_module = container.kind is Kind.ATTRIBUTES and isinstance(owner, torch.nn.Module)
        if of_module and key in HOOKS:
            return self._describe_hooks(owner, key, value, where)
        return self.describe(value, where)

    def _add_object(self, value: Any, where: str) -> None:
        if own_attributes(value) is not None:
            self._add(Kind.ATTRIBUTES, value, where)
        for name in _slot_names(type(value)):
            content = own_attribute(value, name)
            self.slots.append((value, name, content))
            self.describe(content, f"{where}.{name}")

    def _add_function(self, function: types.FunctionType, where: str, text: str) -> None:
        code = function.__code__
        place = f"{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
        cells = []
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self._memo:
                self._memo[id(cell)] = f"cell {len(self._memo)}"
                self._add(Kind.CELL, cell, f"variable {name} of {place}")
            cells.append(self._memo[id(cell)])
        parts = (function.__defaults__, function.__kwdefaults__, function.__dict__)
        texts = [self.describe(part, place) if part else "none" for part in parts]
        self.functions.append(f"{text}: {identity(code)} {id(function.__globals__)} {texts} {cells}")
        if not is_library(code):
            self._names_of(function.__globals__, set(global_names(code)), str(function.__module__))

    def _describe_hooks(self, module: torch.nn.Module, key: str, table: dict[int, Any], where: str) -> str:
        """Hooks in their order, each with how it is called; their numbers, which count all hooks ever made, are left
        out."""
        self._memo.setdefault(id(table), f"@{len(self._memo)}")
        if not table:
            self.containers.append(Container(Kind.DICT, table, where, [], ""))
            return "hooks()"
        flags = [vars(module).get(f"{key}{how}", {}) for how in ("_with_kwargs", "_always_called")]
        container = Container(Kind.DICT, table, where, [], "")
        container.snapshot = content_of(container)
        self.containers.append(container)
        hooks = []
        for number, hook in table.items():
            called = [number in flag for flag in flags]
            repeatable = _is_repeatable(hook)
            text = f"{f'once {identity(hook.__code__)}' if repeatable else self.describe(hook, where)} {called}"
            if not (repeatable and text in hooks):
                hooks.append(text)
        return f"hooks({';'.join(hooks)})"

    def _add_class(self, kind: type) -> None:
        # The dict behind the read-only view: what a changed method or class attribute changes.
        (namespace,) = (d for d in gc.get_referents(kind.__dict__) if isinstance(d, dict))
        library = is_library(kind)
        for name, value in namespace.items():
            # What a library's own methods read is among the code that is run; which methods they are is told here. What
            # Python notes on a class, such as its annotations, leads far away and is read by no forward.
            if (library and isinstance(value, types.FunctionType)) or name in CLASS_NOTES:
                self._memo.setdefault(id(value), f"{type(value).__name__} {identity(value)}")
        self._add(Kind.DICT, namespace, f"class {kind.__qualname__}")

    def _names_of(self, namespace: dict[str, Any], names: set[str], where: str) -> None:
        """Names of a module's globals, and of modules that these lead to."""
        present = sorted(n for n in names if n in namespace and (id(namespace), n) not in self._named)
        for name in present:
            self._named.add((id(namespace), name))
        if not present:
            return
        container = Container(Kind.NAMES, namespace, where, [], "")
        parts = []
        for name in present:
            value = namespace[name]
            passed_over = _own_cache(namespace, value) or _registry(namespace, value)
            container.snapshot += (name, ANYTHING if passed_over else value)
            if isinstance(value, types.ModuleType):
                parts.append(f"{name}:{plain_text(value.__name__)}")
                inner = vars(value)
                self._queue.append(functools.partial(self._names_of, inner, names, value.__name__))
            elif isinstance(value, (types.FunctionType, type)) and is_library(value):
                parts.append(f"{name}:{identity(value)}")
            elif passed_over:
                continue
            else:
                parts.append(f"{name}:{self.describe(value, f'{where}.{name}')}")
        container.part = f"NAMES({';'.join(parts)})"
        self.containers.append(container)


def _is_repeatable(hook: Any) -> bool:
    """Whether ``hook`` does the same however often it runs: those that let inputs require gradients, which transformers
    and PEFT add once more each time that activation checkpointing is switched on."""
    return (
        isinstance(hook, types.FunctionType)
        and hook.__code__.co_name in ("make_inputs_require_grads", "make_inputs_require_grad")
        and not (hook.__closure__ or hook.__defaults__ or hook.__kwdefaults__ or hook.__dict__)
        and is_library(hook)
    )


def _number_of(value: Any) -> str:
    """Tells objects apart. A tensor around others is told by those: PyTorch moves no such tensor, ``model.to`` say, as
    long as there is a weak reference to it, which ``identity`` makes."""
    if isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value):
        return ",".join(str(identity(leaf)) for _, leaf in leaves(value))
    return str(identity(value))


def _own_cache(namespace: dict[str, Any], value: Any) -> bool:
    """Whether ``value`` is a container that PyTorch keeps for itself, as parametrisation keeps its cache."""
    return str(namespace.get("__name__")).startswith("torch.") and isinstance(value, (list, dict, *_COLLECTIONS))


def _registry(namespace: dict[str, Any], value: Any) -> bool:
    """Whether ``value`` is an object of a module of Python's own, where other programs register import hooks, handlers,
    traces: no state of a model, and a way to the state of everything else. Functions, classes and plain values of such
    modules count."""
    if isinstance(value, (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, *_SIMPLE)):
        return False
    return is_standard(str(namespace.get("__name__"))) and not _is_generator(value)


def _is_generator(value: Any) -> bool:
    return isinstance(value, (random.Random, np.random.Generator, np.random.RandomState))


def _is_opaque(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _OPAQUE


def _slot_names(kind: type) -> list[str]:
    names = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return [n for n in names if n not in ("__dict__", "__weakref__")]
