"""Tables of a module's parameters and buffers, of which forwards read visitors."""

from __future__ import annotations

import copy
import weakref
from collections.abc import ItemsView, ValuesView
from typing import Any

import torch

from disco_accel.step.placement.visitors import TABLES, Visits


class _VisitingTable(dict[str, Any]):
    """A module's parameters or buffers, of which forwards read visitors.

    Code in C that reads it past its methods gets the entries themselves, as everything does outside of forwards.
    """

    __slots__ = ("_module", "_name", "_visits")

    def __init__(self, name: str, entries: dict[str, Any], module: torch.nn.Module, visits: Visits) -> None:
        """In the place of ``entries``, the attribute ``name`` of ``module``."""
        super().__init__(entries)
        self._module, self._name, self._visits = weakref.ref(module), name, visits

    def _brought(self, home: Any) -> Any:
        module = self._module()
        # Batch normalisation in training counts no version of the statistics that it writes.
        written = self._name == "_buffers" and module is not None and module.training
        return self._visits.bring(home, written=written)

    def __getitem__(self, key: str) -> Any:
        return self._brought(super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        return self._brought(super().get(key, default))

    def values(self) -> Any:
        return ValuesView(self) if self._visits.scopes else super().values()

    def items(self) -> Any:
        return ItemsView(self) if self._visits.scopes else super().items()

    def copy(self) -> dict[str, Any]:
        return {key: self[key] for key in self}

    def pop(self, key: str, *default: Any) -> Any:
        if key not in self:
            return super().pop(key, *default)
        value = self[key]
        del self[key]
        return value

    def __delitem__(self, key: str) -> None:
        if self._visits.scopes and isinstance(home := dict.get(self, key), torch.Tensor):
            self._visits.scopes[-1].taken.append((self, vars(self._module()), key, home))
        super().__delitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        home = self._visits.home_of(value)
        # A parameter whose visitor is put back comes as a buffer, which is any tensor.
        parameter = home is not value and isinstance(home, torch.nn.Parameter)
        dict.__setitem__(vars(self._module())["_parameters"] if parameter else self, key, home)

    def update(self, *others: Any, **entries: Any) -> None:
        for key, value in dict(*others, **entries).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __ior__(self, other: Any) -> _VisitingTable:  # type: ignore[override, misc]
        self.update(other)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        entries, module = copy.deepcopy(dict(dict.items(self)), memo), memo.get(id(self._module()))
        if module is None:
            return entries
        # In the copy of a model hooks have a copy of the visits, too.
        return _VisitingTable(self._name, entries, module, copy.deepcopy(self._visits, memo))

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        # What is saved of a model has plain tables.
        return dict, (), None, None, iter(dict.items(self))


def watch_tables(model: torch.nn.Module, visits: Visits) -> None:
    """From now on forwards read visitors of the weights and buffers of ``model``."""
    for module in model.modules():
        for name in TABLES:
            vars(module)[name] = _VisitingTable(name, vars(module)[name], module, visits)


def restore_tables(model: torch.nn.Module) -> None:
    """Undo ``watch_tables``."""
    for attributes in [vars(module) for module in model.modules()]:
        for name in TABLES:
            if isinstance(attributes[name], _VisitingTable):
                attributes[name] = dict(dict.items(attributes[name]))
