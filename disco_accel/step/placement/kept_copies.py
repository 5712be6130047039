"""Copies of packed weights that autograd functions of libraries keep as attributes, ``ctx.tensors`` and ``ctx.state``,
out of the sight of PyTorch's hooks for saved tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from disco_accel.quantised.libraries import STATES

_DATA: Any = torch._C.TensorBase.data
_MOST_NODES = 32
"""Nodes of autograd's graph between the output of a module that has a packed weight and the product with it."""


class _KeptCopy:
    """A tensor on the device that a node of the graph keeps until its backward. Its bytes are those of the host's from
    ``go_home`` on, but for the length of that backward."""

    def __init__(self, tensor: torch.Tensor, home: torch.Tensor, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """``tensor`` lies in a copy of ``home``, which ``read`` makes anew."""
        self._tensor, self._home, self._read = tensor, home, read
        self._layout = tensor.size(), tensor.stride(), tensor.storage_offset()

    def go_home(self, *_: Any) -> None:
        """Free the device's memory."""
        size, stride, offset = self._layout
        # Held by the model anyway.
        home = self._home.detach().as_strided(size, stride, offset + self._home.storage_offset())
        _DATA.__set__(self._tensor, home)

    def come(self, *_: Any) -> None:
        """The backward of the node begins."""
        _DATA.__set__(self._tensor, self._read(self._home).as_strided(*self._layout))


def kept_copies(
    output: Any, homes: Mapping[int, torch.Tensor], read: Callable[[torch.Tensor], torch.Tensor]
) -> list[Callable[[], object]]:
    """Functions that send those home which the graph right behind ``output`` keeps of copies of ``homes``, which are
    by the address of a copy's storage. Each comes back by ``read`` when it is needed."""
    found: list[Callable[[], object]] = []
    if not homes:
        return found
    queue = [t.grad_fn for t in _tensors(output) if t.grad_fn is not None]
    seen = set(queue)
    while queue and len(seen) <= _MOST_NODES:
        node: Any = queue.pop(0)
        if isinstance(node, BackwardCFunction):
            kept = [t for value in vars(node).values() for t in _tensors(value)]
            # A view keeps what it was taken from.
            tensors = {id(t): t for t in (*kept, *(t._base for t in kept)) if t is not None}
            copies = [
                _KeptCopy(tensor, home, read)
                for tensor in tensors.values()
                if (home := _home_of(tensor, homes)) is not None and home.dtype == tensor.dtype
            ]
            for copy in copies:
                node.register_prehook(copy.come)
                node.register_hook(copy.go_home)
            found += [copy.go_home for copy in copies]
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                queue.append(after)
    return found


def _home_of(tensor: torch.Tensor, homes: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    # Of a copy that was written to the host does not have the bytes.
    if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided or tensor._version:
        return None
    return homes.get(tensor.untyped_storage().data_ptr())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif type(value).__name__ in STATES:
        yield from _tensors(vars(value))
