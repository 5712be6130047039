"""The Python state that a model's forward can read: attributes, hooks, methods, configs, closures and globals.

A walk from the modules finds every container that such state lives in. Each is compared with an earlier look natively,
by identity; a digest by value says whether two states are equal, so that an earlier state is met again. Attributes of
modules count if code that was run names them; before any code was run all of them count. ``docs/changes.md`` lists what
this sees and what it cannot.
"""

from __future__ import annotations

import array
import collections
import enum
import functools
import gc
import hashlib
import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as torch_module

from disco_accel.errors import CaptureError
from disco_accel.execute.unchanged import ABSENT, ANYTHING, ExecutedCode, Kind, WatchedContainers, WatchedLayouts
from disco_accel.integrate.code_names import attribute_names, global_names, is_library

MAX_CONTAINERS = 200_000
"""A 70B model with adapters has about 60,000; beyond this something else hangs on the model, such as a data set."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_ATOMS = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, enum.Enum, range, slice)
_COLLECTIONS = (set, collections.deque, bytearray, array.array)
_OPAQUE = frozenset(
    [
        "abc",
        "asyncio",
        "builtins",
        "concurrent",
        "contextvars",
        "ctypes",
        "dataclasses",
        "importlib",
        "inspect",
        "io",
        "logging",
        "multiprocessing",
        "numpy",
        "operator",
        "os",
        "pathlib",
        "re",
        "safetensors",
        "select",
        "socket",
        "ssl",
        "subprocess",
        "sys",
        "tempfile",
        "threading",
        "tokenizers",
        "torch",
        "typing",
        "weakref",
        "_io",
        "_thread",
        "_weakref",
    ]
)
"""Packages whose objects are compared by identity alone: nothing that a forward computes with changes inside them."""

TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = {
    "_forward_hooks": "forward hooks",
    "_forward_pre_hooks": "forward pre-hooks",
    "_backward_hooks": "backward hooks",
    "_backward_pre_hooks": "backward pre-hooks",
}
_NOT_READ = frozenset(
    [
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        "_non_persistent_buffers_set",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks_with_kwargs",
    ]
)
"""Attributes of each module that no forward reads, or that change only together with a table of hooks."""

_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
OWN_PREFIX = "_disco"
_PURE = "_disco_pure"
_CLASS_NOTES = frozenset(
    [
        "__annotations__",
        "__dataclass_fields__",
        "__dataclass_params__",
        "__orig_bases__",
        "__parameters__",
        "__dict__",
        "__weakref__",
        "__static_attributes__",
        "_abc_impl",
    ]
)


def pure(function: Callable[..., Any]) -> Callable[..., Any]:
    """Say of a hook, or of another function that a forward calls, that nothing is lost if it does not run each step.

    It then runs when a step is captured, on tensors without values, and what it changes outside the model is not looked
    at. What it does to the values that pass through it becomes part of the plan. Returns ``function``.
    """
    target = getattr(function, "__func__", function)
    setattr(target, _PURE, True)
    _pure_code.update(code for part in (target, type(target).__call__) if (code := getattr(part, "__code__", None)))
    return function


_pure_code: set[types.CodeType] = set()


def is_pure(code: types.CodeType) -> bool:
    """Whether ``code`` is of a function that was marked with ``pure``."""
    return code in _pure_code


@dataclass(slots=True)
class Container:
    """One container of the walk. ``where`` names it in messages; ``part`` is its share of the digest."""

    kind: Kind
    owner: Any
    where: str
    snapshot: list[Any]
    part: str


@dataclass(frozen=True, slots=True)
class Change:
    """A container that differs from its snapshot, and the new values by key: name, index, or what a message says."""

    container: Container
    values: dict[Any, Any]

    @property
    def place(self) -> str:
        """Names the first entry that differs."""
        return _entry_name(self.container, next(iter(self.values)))


class PythonState:
    """The state as it is when this is made. ``names``: attributes of modules that count; None = all.

    ``executed``: code that forwards and backwards have run, whose globals count too.

    Raises:
        CaptureError: more than ``MAX_CONTAINERS`` hang on the model, and ``names`` are known.
    """

    def __init__(
        self, model: torch.nn.Module, names: frozenset[str] | None = None, executed: Iterable[Any] = ()
    ) -> None:
        self._names = names
        self._memo: dict[int, str] = {}
        self._queue: collections.deque[Callable[[], None]] = collections.deque()
        self.containers: list[Container] = []
        self.generators: list[Any] = []
        """Generators of random numbers, of Python's and numpy's classes, that hang on the model."""
        self._tensors: list[torch.Tensor] = []
        self._arrays: list[np.ndarray[Any, Any]] = []
        self._slots: list[tuple[Any, str, Any]] = []
        self._walk(model, executed)
        plain = [t for t in self._tensors if type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_nested]
        self._odd = (
            [t for t in self._tensors if not any(t is p for p in plain)] if len(plain) < len(self._tensors) else []
        )
        self._layouts = WatchedLayouts(plain)
        self._odd_layouts = [_layout(t) for t in self._odd]
        self._array_digests = [_array_digest(a) for a in self._arrays]
        self._watched = WatchedContainers()
        for container in self.containers:
            self._watched.append(container.kind, container.owner, container.snapshot)
        parts = (c.part for c in self.containers)
        extra = (
            *map(_layout, self._tensors),
            *self._array_digests,
            *(self._describe(v, "") for _, _, v in self._slots),
        )
        self.digest = hashlib.blake2b("\n".join(itertools.chain(parts, extra)).encode(), digest_size=16).digest()
        """Equal for states that are equal by value; objects without a value, such as tensors, count by identity."""
        self.last_difference = ""

    def same(self) -> bool:
        """Whether the state is by value as it was, as far as a look without a walk can tell.

        Values that were replaced by equal ones, and attributes that do not count, are taken over. False otherwise:
        ``last_difference`` then names what differs first.
        """
        start = 0
        while (index := self._watched.first_change(start)) >= 0:
            container = self.containers[index]
            snapshot = _content(container)
            difference = self._harmful(container, snapshot)
            if difference is not None:
                self.last_difference = _entry_name(container, difference)
                return False
            container.snapshot = self._masked(container, snapshot)
            self._watched.replace(index, container.kind, container.owner, container.snapshot)
            start = index
        return self._same_values()

    def _same_values(self) -> bool:
        self.last_difference = "the layout of a parameter or buffer"
        if not self._layouts.same() or [_layout(t) for t in self._odd] != self._odd_layouts:
            return False
        self.last_difference = "a numpy array"
        if self._arrays and [_array_digest(a) for a in self._arrays] != self._array_digests:
            return False
        for owner, name, value in self._slots:
            if getattr(owner, name, ABSENT) is not value:
                self.last_difference = f"{type(owner).__name__}.{name}"
                return False
        self.last_difference = ""
        return True

    def changes(self) -> Iterator[Change]:
        """Every container that differs from its snapshot now."""
        index = -1
        while (index := self._watched.first_change(index + 1)) >= 0:
            container = self.containers[index]
            content = _content(container)
            keys, values = _differences(container, content)
            if keys:
                yield Change(container, dict(itertools.zip_longest(keys, values)))

    # How a container is compared again.

    def _harmful(self, container: Container, content: list[Any]) -> Any:
        """The first key of an entry that counts and has changed by value; None if there is none."""
        if container.kind is Kind.EQUAL:
            return ""
        keys, _ = _differences(container, content)
        before = _as_dict(container.kind, container.snapshot)
        now = _as_dict(container.kind, content)
        for key in keys:
            if self._ignored(container, key):
                continue
            old, new = before.get(key, ABSENT), now.get(key, ABSENT)
            if type(old) is type(new) and isinstance(new, (*_PLAIN, *_ATOMS)) and _plain(old) == _plain(new):
                continue
            return key
        same_keys = [k for k in before if not self._ignored(container, k)] == [
            k for k in now if not self._ignored(container, k)
        ]
        return None if same_keys else "its order"

    def _ignored(self, container: Container, key: Any) -> bool:
        if container.kind is not Kind.ATTRIBUTES or not isinstance(container.owner, torch.nn.Module):
            return False
        if not isinstance(key, str) or key in _NOT_READ or key.startswith(OWN_PREFIX):
            return True
        return self._names is not None and key not in self._names and key not in TABLES and key not in _HOOKS

    def _masked(self, container: Container, content: list[Any]) -> list[Any]:
        if container.kind is not Kind.ATTRIBUTES:
            return content
        pairs = zip(content[::2], content[1::2], strict=True)
        return [x for k, v in pairs for x in (k, ANYTHING if self._ignored(container, k) else v)]

    # The walk.

    def _walk(self, model: torch.nn.Module, executed: Iterable[Any]) -> None:
        for name, module in model.named_modules():
            self._describe(module, name or "the model")
        for name in _GLOBAL_HOOKS:
            self._describe(getattr(torch_module, name), f"torch.nn.modules.module.{name}")
        self._drain()
        by_globals: dict[int, tuple[dict[str, Any], set[str]]] = {}
        for code, namespace in executed:
            by_globals.setdefault(id(namespace), (namespace, set()))[1].update(global_names(code))
        for namespace, names in by_globals.values():
            self._names_of(namespace, names, str(namespace.get("__name__", "?")))
        self._drain()

    def _drain(self) -> None:
        while self._queue:
            if len(self.containers) > MAX_CONTAINERS:
                self._queue.clear()
                if self._names is not None:
                    raise CaptureError(
                        f"{self.containers[-1].where}: more than {MAX_CONTAINERS} Python objects hang on the model and "
                        "its forward reads some of them; keep data sets and the like outside of the model"
                    )
                return
            self._queue.popleft()()

    def _describe(self, value: Any, where: str) -> str:
        """The value's share of the digest; containers that it leads to are queued."""
        if isinstance(value, (*_PLAIN, *_ATOMS)):
            return _plain(value)
        known = self._memo.get(id(value))
        if known is not None:
            return known
        if isinstance(value, (tuple, frozenset)):
            items = [self._describe(item, where) for item in value]
            return f"{type(value).__name__}({','.join(items if isinstance(value, tuple) else sorted(items))})"
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)) and hasattr(value, _PURE):
            return f"pure {identity(getattr(value, '__func__', value))}"
        if isinstance(value, types.MethodType):
            return f"method({self._describe(value.__func__, where)},{self._describe(value.__self__, where)})"
        if isinstance(value, functools.partial):
            parts = (self._describe(part, where) for part in (value.func, value.args, value.keywords))
            return f"partial({','.join(parts)})"
        if isinstance(value, (list, dict, *_COLLECTIONS)):
            text = self._memo[id(value)] = f"@{len(self._memo)}"
            kind = Kind.LIST if isinstance(value, list) else Kind.DICT if isinstance(value, dict) else Kind.EQUAL
            self._queue.append(lambda: self._add(kind, value, where))
            if getattr(value, "__dict__", None):
                # A subclass may keep more than its items.
                self._queue.append(lambda: self._add(Kind.ATTRIBUTES, value, where))
            return text
        if isinstance(value, (property, staticmethod, classmethod)):
            inner = (value.fget, value.fset) if isinstance(value, property) else (value.__func__,)
            return f"{type(value).__name__}({','.join(self._describe(part, where) for part in inner)})"
        return self._describe_object(value, where)

    def _describe_object(self, value: Any, where: str) -> str:
        text = self._memo[id(value)] = f"{type(value).__name__} {identity(value)}"
        if isinstance(value, torch.Tensor):
            self._tensors.append(value)
        elif isinstance(value, np.ndarray):
            self._arrays.append(value)
        elif _is_generator(value):
            self.generators.append(value)
        elif isinstance(value, types.FunctionType):
            self._queue.append(lambda: self._add_function(value, where))
        elif isinstance(value, type):
            if not _is_opaque(value) or issubclass(value, torch.nn.Module):
                self._queue.append(lambda: self._add_class(value))
        elif hasattr(value, _PURE) and not isinstance(value, torch.nn.Module):
            pass
        elif isinstance(value, torch.nn.Module) or not _is_opaque(type(value)):
            text = self._memo[id(value)] = f"object {len(self._memo)} {self._class_chain(type(value))}"
            self._queue.append(lambda: self._add_object(value, where))
        return text

    def _class_chain(self, kind: type) -> str:
        return ",".join(self._describe(k, k.__qualname__) for k in kind.__mro__ if k is not object)

    def _add(self, kind: Kind, owner: Any, where: str) -> None:
        container = Container(kind, owner, where, [], "")
        content = _content(container)
        container.snapshot = self._masked(container, content)
        if kind is Kind.EQUAL:
            items = [self._describe(item, where) for item in content[0]]
            parts = sorted(items) if isinstance(owner, set) else items
        elif kind in (Kind.LIST, Kind.CELL):
            parts = [self._describe(v, where) if v is not ABSENT else "absent" for v in content]
        else:
            pairs = zip(content[::2], container.snapshot[1::2], strict=True)
            parts = [
                f"{self._describe(k, where)}:{self._describe(v, _below(container, k)) if v is not ABSENT else 'absent'}"
                for k, v in pairs
                if v is not ANYTHING
            ]
        container.part = f"{kind.name}({';'.join(parts)})"
        self.containers.append(container)

    def _add_object(self, value: Any, where: str) -> None:
        if hasattr(value, "__dict__") and isinstance(value.__dict__, dict):
            self._add(Kind.ATTRIBUTES, value, where)
        for name in _slot_names(type(value)):
            content = getattr(value, name, ABSENT)
            self._slots.append((value, name, content))
            self._describe(content, f"{where}.{name}")

    def _add_function(self, function: types.FunctionType, where: str) -> None:
        code = function.__code__
        place = f"{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self._memo:
                self._memo[id(cell)] = f"cell {len(self._memo)}"
                self._add(Kind.CELL, cell, f"variable {name} of {place}")
        for part in (function.__defaults__, function.__kwdefaults__, function.__dict__):
            if part:
                self._describe(part, place)
        if not is_library(code):
            self._names_of(function.__globals__, set(global_names(code)), str(function.__module__))

    def _add_class(self, kind: type) -> None:
        # The dict behind the read-only view: what a changed method or class attribute changes.
        (namespace,) = (d for d in gc.get_referents(kind.__dict__) if isinstance(d, dict))
        library = is_library(kind)
        for name, value in namespace.items():
            # What a library's own methods read is among the code that is run; which methods they are is told here. What
            # Python notes on a class, such as its annotations, leads far away and is read by no forward.
            if (library and isinstance(value, types.FunctionType)) or name in _CLASS_NOTES:
                self._memo.setdefault(id(value), f"{type(value).__name__} {identity(value)}")
        self._add(Kind.DICT, namespace, f"class {kind.__qualname__}")

    def _names_of(self, namespace: dict[str, Any], names: set[str], where: str) -> None:
        """Names of a module's globals, and of modules that these lead to."""
        present = sorted(n for n in names if n in namespace and id_pair(namespace, n) not in self._memo)
        for name in present:
            self._memo[id_pair(namespace, name)] = ""
        if not present:
            return
        container = Container(Kind.NAMES, namespace, where, [], "")
        parts = []
        for name in present:
            value = namespace[name]
            container.snapshot += (name, value)
            if isinstance(value, types.ModuleType):
                parts.append(f"{name}:{_plain(value.__name__)}")
                inner = vars(value)
                self._queue.append(functools.partial(self._names_of, inner, names, value.__name__))
            elif isinstance(value, (types.FunctionType, type)) and is_library(value):
                parts.append(f"{name}:{identity(value)}")
            else:
                parts.append(f"{name}:{self._describe(value, f'{where}.{name}')}")
        container.part = f"NAMES({';'.join(parts)})"
        self.containers.append(container)


def _below(container: Container, key: Any) -> str:
    if container.kind is Kind.ATTRIBUTES:
        if key in _HOOKS:
            return f"the {_HOOKS[key]} of {container.where}"
        return str(key) if container.where == "the model" else f"{container.where}.{key}"
    return container.where


def _entry_name(container: Container, key: Any) -> str:
    if container.kind is Kind.ATTRIBUTES:
        return _below(container, key)
    if container.kind is Kind.NAMES:
        return f"global {key} of {container.where}"
    if container.kind is Kind.DICT and isinstance(key, str) and key.isidentifier():
        return f"{container.where}, {key}"
    return container.where


def id_pair(namespace: dict[str, Any], name: str) -> Any:
    """A key for a name of a namespace, apart from the ids of objects."""
    return id(namespace), name


def _content(container: Container) -> list[Any]:
    """What a container holds now, as ``WatchedContainers`` wants it."""
    kind, owner = container.kind, container.owner
    if kind is Kind.ATTRIBUTES:
        return list(itertools.chain.from_iterable(dict.items(owner.__dict__)))
    if kind is Kind.DICT:
        return list(itertools.chain.from_iterable(dict.items(owner)))
    if kind is Kind.NAMES:
        return [part for name in container.snapshot[::2] for part in (name, owner.get(name, ABSENT))]
    if kind is Kind.LIST:
        return list.copy(owner)
    if kind is Kind.CELL:
        try:
            return [owner.cell_contents]
        except ValueError:
            return [ABSENT]
    return [owner.copy() if hasattr(owner, "copy") else owner[:]]


def _as_dict(kind: Kind, content: list[Any]) -> dict[Any, Any]:
    if kind in (Kind.ATTRIBUTES, Kind.DICT, Kind.NAMES):
        # By identity: keys of any kind, in order.
        return dict(zip(content[::2], content[1::2], strict=True))
    return dict(enumerate(content))


def _differences(container: Container, content: list[Any]) -> tuple[list[Any], list[Any]]:
    """Keys (names, indices) whose values are others than in the snapshot, and the new values."""
    if container.kind is Kind.EQUAL:
        return [""], list(content[0])
    before, now = _as_dict(container.kind, container.snapshot), _as_dict(container.kind, content)
    keys = [k for k in before if before[k] is not ANYTHING and before[k] is not now.get(k, ABSENT)]
    keys += [k for k in now if k not in before]
    if not keys and list(before) != list(now):
        return ["its order"], []
    return keys, [now.get(k) for k in keys]


def _plain(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"


def _layout(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}"


def _array_digest(values: np.ndarray[Any, Any]) -> str:
    return f"{values.dtype} {values.shape} {hashlib.blake2b(values.tobytes(), digest_size=16).hexdigest()}"


def _is_generator(value: Any) -> bool:
    import random

    return isinstance(value, (random.Random, np.random.Generator, np.random.RandomState))


def _is_opaque(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _OPAQUE


def _slot_names(kind: type) -> list[str]:
    names = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return [n for n in names if n not in ("__dict__", "__weakref__")]


_identities: dict[int, tuple[Callable[[], Any], int]] = {}
_numbers = itertools.count()


def identity(value: Any) -> int:
    """A number that no other object of this process ever has."""
    known = _identities.get(id(value))
    if known is not None and known[0]() is value:
        return known[1]
    try:
        reference: Callable[[], Any] = weakref.ref(value, functools.partial(_forget, id(value)))
    except TypeError:
        # It cannot tell when it is gone, so it stays.
        reference = functools.partial(_itself, value)
    number = next(_numbers)
    _identities[id(value)] = (reference, number)
    return number


def _forget(address: int, reference: Any) -> None:
    if _identities.get(address, (None, 0))[0] is reference:
        del _identities[address]


def _itself(value: Any) -> Any:
    return value


def names_read(executed: ExecutedCode) -> frozenset[str] | None:
    """Names of attributes that ``executed`` code can have read; None where it computes names itself, or is unknown."""
    names: set[str] = set()
    if not executed:
        return None
    for code, *_ in executed:
        read = attribute_names(code)
        if read is None:
            return None
        names |= read
    return frozenset(names)
