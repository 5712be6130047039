"""``tensor.data = other`` while a step is traced: no op, so that a graph would go on with the tensor's old bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses import FakeTensor

from disco_accel.capture.trace_log import active_log
from disco_accel.errors import CaptureError
from disco_accel.native.host_memory import place

_DATA: Any = torch.Tensor.data


@contextmanager
def no_data_assigned() -> Iterator[None]:
    """Refuse such assignments in this thread, but for those of the very bytes that the tensor has.

    Raises:
        CaptureError: from the assignment.
    """
    thread = threading.get_ident()

    def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if threading.get_ident() == thread and place(value) != place(tensor):
            log = active_log()
            raise CaptureError(
                f"module {log.module if log is not None and log.module else '?'}: its forward puts other data into a "
                f"tensor of shape {tuple(tensor.shape)} (tensor.data = ...), which no plan does; if it does so at its "
                "first run only, as layers that convert a weight do, run the model once before prepare()"
            )
        _DATA.__set__(tensor, value)

    FakeTensor.data = property(_DATA.__get__, assign)  # type: ignore[assignment]
    try:
        yield
    finally:
        del FakeTensor.data
