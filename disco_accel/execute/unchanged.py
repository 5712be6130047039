"""Python objects and layouts of tensors compared with an earlier look at them, hundreds in microseconds."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from disco_accel.execute.build_ext import load_extension

_ABSENT = object()
_INTEGERS = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


@functools.cache
def _library() -> ctypes.PyDLL:
    library = ctypes.PyDLL(str(load_extension()))
    library.disco_same_attributes.argtypes = [ctypes.py_object] * 4
    library.disco_same_entries.argtypes = [ctypes.py_object] * 2
    library.disco_same_layouts.argtypes = [ctypes.c_int64]
    library.disco_no_zero.argtypes = [ctypes.c_int64] * 3
    return library


class WatchedAttributes:
    """What objects have under some names in their own ``__dict__``, by identity."""

    def __init__(self, objects: Sequence[object], names: Sequence[str]) -> None:
        self._values = [vars(o).get(name, _ABSENT) for o in objects for name in names]
        self._arguments = list(objects), list(names), self._values, _ABSENT
        self._same = _library().disco_same_attributes

    def same(self) -> bool:
        """Whether each has the very objects that it had when this was made."""
        return bool(self._same(*self._arguments))


class WatchedEntries:
    """The keys and values of dicts, by identity and in their order."""

    def __init__(self, dicts: Sequence[Mapping[Any, Any]]) -> None:
        entries = itertools.chain.from_iterable(map(dict.items, dicts))
        self._arguments = list(dicts), list(itertools.chain.from_iterable(entries))
        self._same = _library().disco_same_entries

    def same(self) -> bool:
        """Whether they hold the very keys and values that they held when this was made."""
        return bool(self._same(*self._arguments))


class WatchedLayouts:
    """Whether plain tensors need gradients, their dtypes and shapes. While they are watched no two can be swapped."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._same = _library().disco_same_layouts
        self._native = torch.classes.disco_accel.WatchedLayouts(list(tensors))
        self._address = self._native.address()

    def same(self) -> bool:
        """Whether they are as when this was made."""
        return bool(self._same(self._address))


def no_zero(tensor: torch.Tensor) -> bool:
    """Whether no element is zero. For small tensors of integers on the CPU a fraction of what an op costs."""
    plain = type(tensor) is torch.Tensor and tensor.dtype in _INTEGERS and tensor.device.type == "cpu"
    if not plain or not tensor.is_contiguous():
        return bool(tensor.all())
    return bool(_library().disco_no_zero(tensor.data_ptr(), tensor.numel(), tensor.element_size()))
