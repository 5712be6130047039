"""Results of ops on fake tensors, remembered from trace to trace: they depend on how the arguments lie, no more.

PyTorch's fake tensors have such a memory too. It reads anew all there is to know of each argument, and takes twenty
times as long to find the answer as to make a tensor from it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import extract_tensor_metadata

_NOT_BY_LAYOUT = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view))
_FAKE: Any = torch._C._TorchDispatchModeKey.FAKE


@dataclass(frozen=True, slots=True)
class _Result:
    """A tensor that an op returned, to be made again: a new one, or a view of argument tensor ``view_of``.

    ``layout``: as of ``FakeResults.layout``. ``attributes``: those of the Python object, without its mode.
    """

    layout: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    attributes: dict[str, Any]
    view_of: int | None

    def again(self, tensors: Sequence[torch.Tensor], mode: FakeTensorMode) -> tuple[FakeTensor, FakeTensor]:
        """The result for arguments ``tensors`` under ``mode``, and a second tensor of the same memory."""
        with torch._C._DisableTorchDispatch():
            if self.view_of is None:
                below = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
            else:
                storage: Any = tensors[self.view_of].untyped_storage()
                below = torch.empty(0, dtype=self.dtype, device="meta")
                below.set_(storage, self.offset, self.shape, self.stride)
            return self._wrapped(below, mode), self._wrapped(below, mode)

    def _wrapped(self, below: torch.Tensor, mode: FakeTensorMode) -> FakeTensor:
        made: Any = torch.Tensor._make_subclass(
            FakeTensor, below, False, dispatch_device=True, device_for_backend_keys=self.device
        )
        if mode._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
        else:
            torch._C._set_throw_on_mutable_data_ptr(made)
        made.__dict__.update(self.attributes, fake_mode=mode)
        return made  # type: ignore[no-any-return]


_MOST = 50_000
"""Results that are kept: ten models of 80 layers in two lengths each, some ten MiB."""


class _Memory:
    """``layouts``: the known facts of a tensor → a number of its own, also where two threads ask at once. ``results``:
    the key of a call → its result."""

    def __init__(self) -> None:
        self.layouts: dict[tuple[Any, ...], int] = {}
        self.results: dict[tuple[Any, ...], _Result | tuple[_Result | None, ...] | None] = {}
        self.numbers = itertools.count(1)


class FakeResults:
    """Results of the ops of a trace under the fake mode that is on when this is made, by their keys."""

    _of_all_traces: ClassVar[_Memory] = _Memory()

    def __init__(self) -> None:
        mode: Any = torch._C._get_dispatch_mode(_FAKE)
        plain = isinstance(mode, FakeTensorMode) and mode.shape_env is None and not mode.propagate_real_tensors
        self._mode: Any = mode if plain else None
        self._settings = (mode.allow_fallback_kernels, mode.static_shapes) if plain else ()
        if len(self._of_all_traces.results) > _MOST:
            # A trace under way keeps the one that its numbers are of.
            FakeResults._of_all_traces = _Memory()
        self._memory = self._of_all_traces

    def layout(self, tensor: torch.Tensor) -> int:
        """A number for all that an op's result may depend on in a tensor without values; 0 for any other tensor."""
        known: Any = tensor
        if type(tensor) is not FakeTensor or known.fake_mode is not self._mode or known.constant is not None:
            return 0
        if tensor.layout is not torch.strided:
            return 0
        data = extract_tensor_metadata(tensor)
        place = data.dtype, tuple(data.shape), tuple(data.stride), data.device, data.storage_offset, data.storage_bytes
        flags = data.is_quantized, data.is_conj, data.is_neg, data.is_inference
        return self._memory.layouts.setdefault((*place, *flags), next(self._memory.numbers))

    def key(self, func: OpOverload, arguments: list[Any]) -> tuple[Any, ...] | None:
        """All that the result of ``func`` depends on: ``arguments`` has the layout of each tensor, and each number with
        its type. None: it depends on more."""
        mode: Any = torch._C._get_dispatch_mode(_FAKE)
        if mode is not self._mode or not _by_layout(func):
            return None
        default: Any = torch._C._get_default_device()
        inference = torch.is_inference_mode_enabled()
        return func, self._settings, torch.get_default_dtype(), default, inference, *arguments

    def again(self, key: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> tuple[Any, Any, Any] | None:
        """The earlier result of the call with ``key``, made again for ``tensors``; the same for its twins; its layouts.
        None where it can't be made."""
        result = self._memory.results.get(key)
        if isinstance(result, _Result):
            return *result.again(tensors, self._mode), result.layout
        if result is None:
            return None
        pairs = [(None, None) if item is None else item.again(tensors, self._mode) for item in result]
        made, twins = zip(*pairs, strict=True)
        return made, twins, [0 if item is None else item.layout for item in result]

    def keep(self, key: tuple[Any, ...], tensors: Sequence[torch.Tensor], returned: Any) -> None:
        """Remember the result of the call with ``key`` for argument tensors ``tensors``."""
        if key not in self._memory.results:
            self._memory.results[key] = self._read(tensors, returned)

    def _read(self, tensors: Sequence[torch.Tensor], returned: Any) -> _Result | tuple[_Result | None, ...] | None:
        if isinstance(returned, torch.Tensor):
            return self._read_one(tensors, returned)
        if type(returned) is not tuple or not all(item is None or isinstance(item, torch.Tensor) for item in returned):
            return None
        results = [None if item is None else self._read_one(tensors, item) for item in returned]
        made = [item.untyped_storage()._cdata for item in returned if item is not None]
        # Results that share a new storage would each get one of their own.
        complete = sum(result is not None for result in results) == len(made) == len(set(made))
        return tuple(results) if complete else None

    def _read_one(self, tensors: Sequence[torch.Tensor], made: Any) -> _Result | None:
        layout = self.layout(made)
        if not layout or made.requires_grad or any(made is tensor for tensor in tensors):
            return None
        storage = made.untyped_storage()._cdata
        shared = [i for i, tensor in enumerate(tensors) if tensor.untyped_storage()._cdata == storage]
        if len(shared) > 1:
            return None
        place = tuple(made.shape), made.stride(), int(made.storage_offset()), made.dtype, made.fake_device
        attributes = {name: value for name, value in made.__dict__.items() if name != "fake_mode"}
        result = _Result(layout, *place, attributes, shared[0] if shared else None)
        again, _ = result.again(tensors, self._mode)
        same_keys = torch._C._dispatch_key_set(again) == torch._C._dispatch_key_set(made)
        return result if same_keys and self.layout(again) == layout and again.__dict__ == made.__dict__ else None


@functools.cache
def _by_layout(func: OpOverload) -> bool:
    """Whether the result of ``func`` depends on nothing but how its arguments lie."""
    if func._schema.is_mutable or not _NOT_BY_LAYOUT.isdisjoint(func.tags) or "lift" in func._schema.name:
        return False
    # Whoever registers ops of his own may register rules for fake tensors that do anything.
    return bool(torch._library.utils.is_builtin(func))
