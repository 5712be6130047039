"""Python objects and layouts of tensors compared with an earlier look at them, thousands in microseconds."""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch

from disco_accel.native.extension import load_extension


class _Marker:
    """A value that is no object of a program's."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def __deepcopy__(self, memo: Any) -> _Marker:
        return self


ANYTHING, ABSENT = _Marker("anything"), _Marker("absent")
"""In a snapshot: a value that does not matter, and one that is not there."""

_INTEGERS = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


class Kind(IntEnum):
    """Kinds of containers; the numbers are those of ``runtime_ext/torch/python_watch.cpp``."""

    ATTRIBUTES = 0
    DICT = 1
    LIST = 2
    CELL = 3
    NAMES = 4
    EQUAL = 5


@functools.cache
def _library() -> ctypes.PyDLL:
    library, number, thing = ctypes.PyDLL(str(load_extension())), ctypes.c_int64, ctypes.py_object
    for name, result, arguments in (
        ("watch_new", number, (thing, thing)),
        ("watch_free", None, (number,)),
        ("watch_set", None, (number, number, number, thing, thing)),
        ("watch_first_change", number, (number, number)),
        ("code_log_start", None, (thing,)),
        ("code_log_collecting", None, (ctypes.c_int,)),
        ("code_log_stop", None, ()),
        ("same_layouts", ctypes.c_int, (number,)),
        ("no_zero", ctypes.c_int, (number, number, number)),
    ):
        function = getattr(library, f"disco_{name}")
        function.restype, function.argtypes = result, arguments
    return library


class WatchedContainers:
    """Containers and the objects that each held when it was last set, compared by identity and in their order.

    A snapshot is a list: keys and values in turn (ATTRIBUTES, DICT, NAMES), items (LIST), the content or ``ABSENT``
    (CELL), or one copy to compare by ``==`` (EQUAL). ``ANYTHING`` in a snapshot fits every value. Owners and
    snapshots, which must not be changed, are kept alive.
    """

    def __init__(self) -> None:
        library = _library()
        self._set = library.disco_watch_set
        self._first_change = library.disco_watch_first_change
        self._address = library.disco_watch_new(ANYTHING, ABSENT)
        self._alive: list[tuple[Any, list[Any]]] = []
        weakref.finalize(self, library.disco_watch_free, self._address).atexit = False

    def append(self, kind: Kind, owner: Any, snapshot: list[Any]) -> None:
        """Watch one more container."""
        self._alive.append((owner, snapshot))
        self._set(self._address, len(self._alive) - 1, int(kind), owner, snapshot)

    def replace(self, index: int, kind: Kind, owner: Any, snapshot: list[Any]) -> None:
        """Compare container ``index`` with another snapshot from now on."""
        self._set(self._address, index, int(kind), owner, snapshot)
        self._alive[index] = (owner, snapshot)

    def first_change(self, start: int = 0) -> int:
        """Index of the first container from ``start`` on that differs from its snapshot; -1 if none does."""
        return int(self._first_change(self._address, start))


ExecutedCode = list[tuple[types.CodeType, dict[str, Any], bool]]
"""Code that was run, its globals, and whether autograd ran it in a backward; once for either."""


@contextmanager
def executed_code() -> Iterator[ExecutedCode]:
    """The Python code that this thread begins to run inside, filled at the end: without that of garbage collections,
    which happen anywhere. Stays empty where another profiler is active, which would be cut off."""
    executed: ExecutedCode = []
    if sys.getprofile() is not None:
        yield executed
        return
    entries: list[Any] = []
    library = _library()

    def collection_begins(phase: str, _info: object) -> None:
        if phase == "start":
            library.disco_code_log_collecting(1)

    def collection_ends(phase: str, _info: object) -> None:
        if phase == "stop":
            library.disco_code_log_collecting(0)

    # Around the callbacks of others.
    gc.callbacks.insert(0, collection_begins)
    gc.callbacks.append(collection_ends)
    library.disco_code_log_start(entries)
    try:
        yield executed
    finally:
        library.disco_code_log_stop()
        for callback in (collection_begins, collection_ends):
            if callback in gc.callbacks:
                gc.callbacks.remove(callback)
        executed.extend(zip(entries[::3], entries[1::3], entries[2::3], strict=True))


def watched_layouts(tensors: Sequence[torch.Tensor]) -> Callable[[], bool]:
    """A function that compares plain tensors with now: whether they need gradients, their dtypes and shapes. While it
    lives no two can be swapped."""
    # It registers the class.
    same = _library().disco_same_layouts
    native = torch.classes.disco_accel.WatchedLayouts(list(tensors))
    address = native.address()

    def unchanged(_kept: object = native) -> bool:
        return bool(same(address))

    return unchanged


def no_zero(tensor: torch.Tensor) -> bool:
    """Whether no element is zero. Small tensors of integers on the CPU take a fraction of the time of an op."""
    plain = type(tensor) is torch.Tensor and tensor.dtype in _INTEGERS and tensor.is_cpu
    if not plain or not tensor.is_contiguous():
        return bool(tensor.all())
    return bool(_library().disco_no_zero(tensor.data_ptr(), tensor.numel(), tensor.element_size()))
