"""Rules for ops that torch's fake tensors refuse although the kernels take them; a filter for their log lines."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses import FakeTensorMode, fake_impls

from disco_accel.capture.thread_patches import patched
from disco_accel.graph.op_traits import OP_TRAITS
from disco_accel.native.op_encoding import op_overload
from disco_accel.quantised.libraries import LIBRARIES


@contextmanager
def fake_kernels() -> Iterator[None]:
    """Let fake tensors through ops that torch's own rules refuse, such as ``_grouped_mm`` in float32 and float16."""
    table, thread = fake_impls.op_implementations_dict, threading.get_ident()
    added = []
    for name, rule in _RULES.items():
        op = op_overload(name, "default")
        if op not in table:
            table[op] = _of_thread(thread, rule)
            added.append(op)
    try:
        yield
    finally:
        for op in added:
            table.pop(op, None)


def _of_thread(thread: int, rule: Callable[..., Any]) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> Any:
        return rule(*args, **kwargs) if threading.get_ident() == thread else NotImplemented

    return fake


def _grouped_mm(
    mode: FakeTensorMode,
    func: torch._ops.OpOverload,
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """The layout that the kernels give; they demand rows of whole 16 bytes, so nothing is padded."""
    dtypes = {a.dtype, b.dtype}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float16} or bias is not None or out_dtype is not None:
        return NotImplemented
    if a.dim() == b.dim():
        groups = b.shape[0] if offs is None else offs.shape[0]
        shape: tuple[int, ...] = (groups, a.shape[-2], b.shape[-1])
    else:
        # One operand is a stack of matrices, the other one's rows (or columns) are divided among them.
        shape = (a.shape[-2], b.shape[-1])
    with mode:
        return torch.empty(shape, dtype=a.dtype, device=a.device)


@contextmanager
def libraries_patched() -> Iterator[None]:
    """Methods of tensors are as libraries that pack weights need them over fakes (``QuantLibrary.tensor_patches``)."""
    with ExitStack() as stack:
        for library in LIBRARIES:
            for name, make in library.tensor_patches.items():
                stack.enter_context(patched(torch.Tensor, name, make))
        yield


_RULES: dict[str, Callable[..., Any]] = {"aten::_grouped_mm": _grouped_mm}
assert _RULES.keys() == {name for name, traits in OP_TRAITS.items() if traits.fake_rule}


@contextmanager
def quiet() -> Iterator[None]:
    """Torch logs a traceback for an op it cannot fake, on top of the error it raises."""
    logger, thread = logging.getLogger("torch._subclasses.fake_tensor"), threading.get_ident()

    def elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(elsewhere)
    try:
        yield
    finally:
        logger.removeFilter(elsewhere)
