"""Rules for ops that torch's fake tensors refuse, or lay out otherwise than the kernels; a filter for log lines."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
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
    """Let fake tensors through ops that torch's own rules refuse, such as ``_grouped_mm`` in float32 and float16, and
    give views of tensors with dimensions of size 1 the strides of real ones."""
    table, thread = fake_impls.op_implementations_dict, threading.get_ident()
    before = {}
    for name, rule in {**_RULES, **_VIEWS}.items():
        op = op_overload(name, "default")
        known = table.get(op)
        if known is None or name in _VIEWS:
            table[op] = _of_thread(thread, rule, known)
            before[op] = known
    try:
        yield
    finally:
        for op, known in before.items():
            if known is None:
                table.pop(op, None)
            else:
                table[op] = known


def _of_thread(thread: int, rule: Callable[..., Any], before: Callable[..., Any] | None) -> Callable[..., Any]:
    """``rule`` in ``thread``; elsewhere, and where it says NotImplemented, what was there ``before``."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        found = rule(*args, **kwargs) if threading.get_ident() == thread else NotImplemented
        return before(*args, **kwargs) if found is NotImplemented and before is not None else found

    return fake


def _view(mode: FakeTensorMode, func: torch._ops.OpOverload, a: torch.Tensor, shape: Sequence[int]) -> Any:
    """As the kernel lays it out: torch's rule gives dimensions of size 1 other strides, by which a matrix product with
    one row, as in decoding, chooses another kernel."""
    if 1 not in a.shape and 1 not in shape:
        return NotImplemented
    with torch._C._DisableTorchDispatch():
        like = torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta").view(shape)
    return a.as_strided(like.shape, like.stride(), a.storage_offset())


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


_VIEWS: dict[str, Callable[..., Any]] = {"aten::view": _view, "aten::_unsafe_view": _view}
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
