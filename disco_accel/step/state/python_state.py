"""The Python state that a model's forward can read: attributes, hooks, methods, configs, closures and globals.

A walk from the modules finds every container that such state lives in. Each is compared with an earlier look natively,
by identity; a digest by value says whether two states are equal, so that an earlier state is met again. Attributes of
modules count if code that was run names them; before any code was run all of them count. ``docs/changes.md`` lists the
changes that this sees and those that it cannot.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from disco_accel.capture.parts import packed_beside_state
from disco_accel.native.change_watch import ExecutedCode, Kind, WatchedContainers, watched_layouts
from disco_accel.step.capture_lock import between_captures
from disco_accel.step.state.containers import (
    PLAIN,
    Change,
    as_dict,
    content_of,
    differences,
    entry_name,
    harmful_key,
    masked,
    own_attribute,
)
from disco_accel.step.state.forward_code import attribute_names
from disco_accel.step.state.walk import Walk


class PythonState:
    """The state as it is when this is made. ``names``: attributes of modules that count; None = all.

    ``executed``: code that forwards and backwards have run, whose globals count too.

    Raises:
        CaptureError: more hangs on the model than can be compared at each step, and ``names`` are known.
    """

    def __init__(
        self, model: torch.nn.Module, names: frozenset[str] | None = None, executed: Iterable[Any] = ()
    ) -> None:
        self._names, self._executed = names, list(executed)
        walk = Walk(model, names, self._executed)
        self.containers, self.generators = walk.containers, walk.generators
        self._arrays, self._slots = walk.arrays, walk.slots
        self._array_digests = [_array_digest(a) for a in self._arrays]
        # Of a subclass or a nested tensor the native look knows no layout.
        plain = {id(t): t for t in walk.tensors if _has_layout(t)}
        self._same_layouts = watched_layouts(list(plain.values()))
        self._odd = [t for t in walk.tensors if id(t) not in plain]
        self._odd_layouts = [_layout(t) for t in self._odd]
        self._watched = WatchedContainers()
        for container in self.containers:
            self._watched.append(container.kind, container.owner, container.snapshot)
        parts = (c.part for c in self.containers)
        extra = (
            *walk.functions,
            *map(_layout, walk.tensors),
            *self._array_digests,
            *(walk.describe(v, "") for *_, v in self._slots),
        )
        self.digest = hashlib.blake2b("\n".join(itertools.chain(parts, extra)).encode(), digest_size=16).digest()
        """Equal for states that are equal by value; objects without a value, such as tensors, count by identity."""
        self.last_difference = ""

    def same(self) -> bool:
        """Whether the state is by value as it was, as far as a look without a walk can tell.

        Values that were replaced by equal ones, and attributes that do not count, are taken over. False otherwise:
        ``last_difference`` then names the first difference.
        """
        start = 0
        while (index := self._watched.first_change(start)) >= 0:
            container = self.containers[index]
            content = content_of(container)
            key = harmful_key(container, content, self._names)
            if key is not None:
                self.last_difference = entry_name(container, key)
                return False
            container.snapshot = masked(container, content, self._names)
            self._watched.replace(index, container.kind, container.owner, container.snapshot)
            start = index
        return self._same_values()

    def returned(self, model: torch.nn.Module) -> bool:
        """Whether ``model`` is in this state by value, also if it has been in other states meanwhile."""
        if self.same():
            return True
        with between_captures():
            return self.same() or PythonState(model, self._names, self._executed).digest == self.digest

    def _same_values(self) -> bool:
        self.last_difference = "the layout of a parameter or buffer"
        if not self._same_layouts() or [_layout(t) for t in self._odd] != self._odd_layouts:
            return False
        self.last_difference = "a numpy array"
        if self._arrays and [_array_digest(a) for a in self._arrays] != self._array_digests:
            return False
        for owner, name, value in self._slots:
            if own_attribute(owner, name) is not value:
                self.last_difference = f"{type(owner).__name__}.{name}"
                return False
        self.last_difference = ""
        return True

    def changes(self) -> Iterator[Change]:
        """Every container that differs from its snapshot now."""
        index = -1
        while (index := self._watched.first_change(index + 1)) >= 0:
            container = self.containers[index]
            values = differences(container, content_of(container))
            if values:
                yield container, values

    def holds_all_but_plain_values(self) -> bool:
        """Whether all that differs from it now is plain values, such as ``training``: it keeps no object alive that the
        model has lost."""
        for container, values in self.changes():
            before = as_dict(container.kind, container.snapshot) if container.kind is not Kind.EQUAL else {}
            if not all(
                isinstance(before.get(key), PLAIN) and isinstance(value, PLAIN) for key, value in values.items()
            ):
                return False
        return True


def _has_layout(tensor: torch.Tensor) -> bool:
    return (type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_nested) or packed_beside_state(tensor)


def _layout(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}"


def _array_digest(values: np.ndarray[Any, Any]) -> str:
    return f"{values.dtype} {values.shape} {hashlib.blake2b(values.tobytes(), digest_size=16).hexdigest()}"


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
