"""Other threads' forwards of single modules wait while the model that these are part of is captured.

Tensors that the traced forward leaves in the attributes of modules have no values, and stay until the capture is over.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from disco_accel.errors import CaptureError


class _Capture:
    """A capture by ``thread`` of a model with ``modules``, by identity; ``mode`` makes the tensors of its trace."""

    def __init__(self, model: torch.nn.Module, mode: FakeTensorMode | None) -> None:
        self.thread = threading.get_ident()
        self.mode = mode
        self.modules = frozenset(map(id, model.modules()))
        self.over = threading.Event()


_captures: list[_Capture] = []


@contextmanager
def modules_wait(model: torch.nn.Module, mode: FakeTensorMode | None = None) -> Iterator[None]:
    """Forwards of the modules of ``model`` that other threads begin during a trace wait until this is over.

    A step may be traced several times: forwards that wait since the first trace must not go on in the second. Between
    traces there is no hook to wait in, since a plan is made for a model with its hooks. ``mode``: of the trace inside.
    """
    capture = _Capture(model, mode)
    _captures.append(capture)
    try:
        yield
    finally:
        _captures.remove(capture)
        capture.over.set()


def wait_for_capture(module: torch.nn.Module, args: Any) -> None:
    """A forward pre-hook of all modules while a step is traced.

    Raises:
        CaptureError: the trace itself runs ``module`` in this thread.
    """
    while captures := _captures_of(module):
        modes = [capture.mode for capture in captures]
        if any(isinstance(leaf, FakeTensor) and leaf.fake_mode in modes for leaf in tree_leaves(args)):
            # The traced forward waits for this thread, or will: both would wait for ever.
            raise CaptureError(
                f"the model's forward runs a {type(module).__name__} in a thread of its own, whose ops a capture does "
                "not see; run it in the thread of the forward"
            )
        captures[0].over.wait()


def _captures_of(module: torch.nn.Module) -> list[_Capture]:
    """The captures by other threads that ``module`` is part of."""
    me = threading.get_ident()
    return [c for c in tuple(_captures) if c.thread != me and id(module) in c.modules]
