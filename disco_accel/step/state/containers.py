"""Containers of Python state: their content, how two looks at one differ, and the names of entries in messages."""

from __future__ import annotations

import enum
import functools
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from disco_accel.native.change_watch import ABSENT, ANYTHING, Kind
from disco_accel.quantised.libraries import REWRITTEN

PLAIN = (type(None), bool, int, float, complex, str, bytes)
ATOMS = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, enum.Enum, range, slice)
"""Immutable values, which are compared by their text."""

TABLES = ("_parameters", "_buffers", "_modules")
HOOKS = {
    "_forward_hooks": "forward hooks",
    "_forward_pre_hooks": "forward pre-hooks",
    "_backward_hooks": "backward hooks",
    "_backward_pre_hooks": "backward pre-hooks",
}
NOT_READ = frozenset(
    [
        *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"),
        *("_load_state_dict_post_hooks", "_non_persistent_buffers_set", "_forward_hooks_with_kwargs"),
        *("_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"),
    ]
)
"""Attributes of each module that no forward reads, or that change only together with a table of hooks."""

CLASS_NOTES = frozenset(
    [
        *("__annotations__", "__dataclass_fields__", "__dataclass_params__", "__orig_bases__"),
        *("__parameters__", "__dict__", "__weakref__", "__static_attributes__", "_abc_impl"),
        *("__slotnames__", "__abstractmethods__", "__doc__"),
    ]
)
"""Entries that Python adds to a class at any time, and that no forward reads."""
OWN_MARK = "_disco_own"
"""On functions that this package puts on a model for a while."""
OWN_PREFIX = "_disco"
"""Of attributes that this package keeps on a model."""


@dataclass(slots=True)
class Container:
    """One container of the walk. ``where`` names it in messages; ``part`` is its share of the digest."""

    kind: Kind
    owner: Any
    where: str
    snapshot: list[Any]
    part: str


Change = tuple[Container, dict[Any, Any]]
"""A container that differs from its snapshot, and the new values by key: a name, an index, or words for a message."""


def below(container: Container, key: Any) -> str:
    if container.kind is Kind.ATTRIBUTES:
        if key in HOOKS:
            return f"the {HOOKS[key]} of {container.where}"
        return str(key) if container.where == "the model" else f"{container.where}.{key}"
    module, _, table = container.where.rpartition(".")
    if table in TABLES:
        return f"{module}.{key}" if module else str(key)
    return container.where


def entry_name(container: Container, key: Any) -> str:
    if container.kind is Kind.ATTRIBUTES:
        return below(container, key)
    if container.kind is Kind.NAMES:
        return f"global {key} of {container.where}"
    if container.kind is Kind.DICT and isinstance(key, str) and key.isidentifier():
        return f"{container.where}, {key}"
    return container.where


def own_attribute(owner: Any, name: str) -> Any:
    """The value of ``owner`` itself under ``name``, or ``ABSENT``. A ``__getattr__`` of its class is not asked: it may
    do anything."""
    try:
        return object.__getattribute__(owner, name)
    except AttributeError:
        return ABSENT


def own_attributes(owner: Any) -> dict[str, Any] | None:
    """The dict of the instance's own attributes, if it has one."""
    attributes = own_attribute(owner, "__dict__")
    return attributes if isinstance(attributes, dict) else None


def content_of(container: Container) -> list[Any]:
    """The content of a container now, in the form that ``WatchedContainers`` takes."""
    kind, owner = container.kind, container.owner
    if kind is Kind.ATTRIBUTES:
        return list(itertools.chain.from_iterable(dict.items(own_attributes(owner) or {})))
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


def as_dict(kind: Kind, content: list[Any]) -> dict[Any, Any]:
    if kind in (Kind.ATTRIBUTES, Kind.DICT, Kind.NAMES):
        # By identity: keys of any kind, in order.
        return dict(zip(content[::2], content[1::2], strict=True))
    return dict(enumerate(content))


def differences(container: Container, content: list[Any]) -> dict[Any, Any]:
    """Keys (names, indices) whose values are others than in the snapshot, with their new values."""
    if container.kind is Kind.EQUAL:
        return dict(enumerate(content[0])) or {"": None}
    before, now = as_dict(container.kind, container.snapshot), as_dict(container.kind, content)
    changed = {k: now.get(k) for k in before if before[k] is not ANYTHING and before[k] is not now.get(k, ABSENT)}
    changed |= {k: v for k, v in now.items() if k not in before}
    return changed if changed or list(before) == list(now) else {"its order": None}


def ignored(container: Container, key: Any, names: frozenset[str] | None) -> bool:
    """Whether the entry ``key`` of ``container`` makes no difference to a forward. ``names``: of the attributes of
    modules that count; None = all."""
    if container.kind is Kind.DICT:
        return isinstance(key, str) and key in CLASS_NOTES
    if container.kind is not Kind.ATTRIBUTES:
        return False
    if not isinstance(container.owner, torch.nn.Module):
        return key in REWRITTEN.get(type(container.owner).__name__, ())
    if not isinstance(key, str) or key in NOT_READ or key.startswith(OWN_PREFIX):
        return True
    if key == "forward" and hasattr(container.owner.__dict__.get(key), OWN_MARK):
        return True
    return names is not None and key not in names and key not in TABLES and key not in HOOKS


def masked(container: Container, content: list[Any], names: frozenset[str] | None) -> list[Any]:
    """``content`` with ``ANYTHING`` for the values that make no difference. ``names``: see ``ignored``."""
    if container.kind not in (Kind.ATTRIBUTES, Kind.DICT):
        return content
    pairs = zip(content[::2], content[1::2], strict=True)
    return [x for k, v in pairs for x in (k, ANYTHING if ignored(container, k, names) else v)]


def harmful_key(container: Container, content: list[Any], names: frozenset[str] | None) -> Any:
    """The first key of an entry that counts and has changed by value; None if there is none. ``names``: see
    ``ignored``."""
    if container.kind is Kind.EQUAL:
        return ""
    before, now = as_dict(container.kind, container.snapshot), as_dict(container.kind, content)
    for key in differences(container, content):
        old, new = before.get(key, ABSENT), now.get(key, ABSENT)
        equal = type(old) is type(new) and isinstance(new, (*PLAIN, *ATOMS)) and plain_text(old) == plain_text(new)
        if not equal and not ignored(container, key, names):
            return key
    # What made no difference before may be gone by now.
    dropped = {k for k, v in before.items() if v is ANYTHING}
    counting = ([k for k in e if k not in dropped and not ignored(container, k, names)] for e in (before, now))
    return None if next(counting) == next(counting) else "its order"


def plain_text(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"


_identities: dict[int, tuple[Callable[[], Any], int]] = {}
_numbers = itertools.count()


def identity(value: Any) -> int:
    """A number that no other object of this process ever has."""
    known = _identities.get(id(value))
    if known is not None and known[0]() is value:
        return known[1]
    try:
        reference: Callable[[], Any] = weakref.ref(value, functools.partial(_forget, _identities, id(value)))
    except TypeError:
        # It cannot tell when it is gone, so it stays.
        reference = functools.partial(_itself, value)
    number = next(_numbers)
    _identities[id(value)] = (reference, number)
    return number


def _forget(identities: dict[int, tuple[Callable[[], Any], int]], address: int, reference: Any) -> None:
    # At the end of a process objects go after the names of this module.
    if identities.get(address, (None, 0))[0] is reference:
        del identities[address]


def _itself(value: Any) -> Any:
    return value
