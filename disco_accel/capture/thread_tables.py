"""Tables of parameters, buffers and submodules whose changes by one thread are seen by that thread alone.

While a step is traced twins stand for a model's tensors, and the forward may take entries out and put others in. Other
threads meanwhile save the model, average its weights, or are in the middle of a forward of one of its modules: they
must read the weights, never the twins.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_NAMES = ("_parameters", "_buffers", "_modules")


class _ThreadTable(dict[str, Any]):
    """Stands for ``table``: the thread that makes it has a copy, all others read and write ``table`` itself through it.

    It is a ``dict`` because ``torch.nn.Module`` asks for one. Code in C that reads it past its methods gets the entries
    that ``table`` had at first.
    """

    def __init__(self, table: dict[str, Any]) -> None:
        super().__init__(table)
        self._table = table
        self._own = dict(table)
        self._thread = threading.get_ident()

    @property
    def view(self) -> dict[str, Any]:
        """The entries as the thread that asks sees them."""
        return self._own if threading.get_ident() == self._thread else self._table

    def __ior__(self, other: Any) -> _ThreadTable:  # type: ignore[override, misc]
        self.view.update(other)
        return self

    def __copy__(self) -> dict[str, Any]:
        return self.view.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self.view, memo)

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        # What is saved of a model has plain tables.
        return dict, (), None, None, iter(self.view.items())


def _of_view(name: str) -> Callable[..., Any]:
    def method(self: _ThreadTable, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.view, name)(*args, **kwargs)

    return method


_READING = ("get", "keys", "values", "items", "copy", "__getitem__", "__contains__", "__iter__", "__reversed__")
_COMPARING = ("__len__", "__eq__", "__ne__", "__or__", "__ror__", "__repr__")
_WRITING = ("pop", "popitem", "clear", "update", "setdefault", "__setitem__", "__delitem__")
for _name in (*_READING, *_COMPARING, *_WRITING):
    setattr(_ThreadTable, _name, _of_view(_name))


@contextmanager
def own_tables(model: torch.nn.Module) -> Iterator[None]:
    """Inside, this thread alone sees its changes of the tables of the modules of ``model``. Afterwards they are undone,
    while changes by others stay.

    Some forwards take a parameter out and put it back: parametrisation, PEFT's adapters of attention and of bare
    parameters. Here they put a twin back, as a buffer or as an attribute.
    """
    tables = [(vars(module), name, vars(module)[name]) for module in list(model.modules()) for name in _NAMES]
    for attributes, name, table in tables:
        attributes[name] = _ThreadTable(table)
    try:
        yield
    finally:
        for attributes, name, table in tables:
            attributes[name] = table
            # An attribute of the same name would hide the entry.
            for entry in table.keys() & attributes.keys():
                del attributes[entry]
