"""A frozen weight whose memory is in a store: a tensor without memory of its own, fetched by each op that reads it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map_only

from disco_accel.errors import StoreError
from disco_accel.store.stored_object import Layout
from disco_accel.store.weight_uses import Weight, WeightUses


class OffloadedWeight(torch.Tensor):
    """A weight of a store, or a view of one, that is read-only and holds no memory.

    It has the shape, strides and type of the weight, and PyTorch's kernels get the weight itself: fetched for that op
    alone. So autograd, which saves it for the backward, saves no memory either; nor does a checkpointed region. A view
    is another of these. What writes to it is refused: nobody would see what was written.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _weight: Weight
    _uses: WeightUses

    @staticmethod
    def __new__(cls, weight: Weight, uses: WeightUses, layout: Layout) -> OffloadedWeight:
        """The part of ``weight`` that lies at ``layout``."""
        made: OffloadedWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            layout.size,
            strides=layout.stride,
            storage_offset=layout.offset,
            dtype=layout.dtype,
            device=weight.item.store.device,
            requires_grad=False,
        )
        made._weight, made._uses = weight, uses
        return made

    def __init__(self, weight: Weight, uses: WeightUses, layout: Layout) -> None:
        """See ``__new__``."""

    @property
    def weight(self) -> Weight:
        """Of which it is the whole or a part."""
        return self._weight

    @property
    def layout_in_store(self) -> Layout:
        """How it lies in the weight's bytes."""
        return Layout(self.dtype, tuple(self.size()), self.stride(), int(self.storage_offset()))

    def fetch(self) -> torch.Tensor:
        """The weight itself, brought back if it was evicted: a plain tensor that stays while it lives. Not for hands
        that could write to it.

        Raises:
            StoreFull, StoreGone: as ``Store.get``.
        """
        item = self._weight.item
        seconds, soon = self._uses.use(self._weight)
        memory = item.store.get(item.id)
        if seconds is not None:
            item.store.put(item.id, next_use=seconds)
        for other in soon:
            item.store.prefetch(other.item.id)
        return self.layout_in_store.lay_on(memory)

    def copied(self) -> torch.Tensor:
        """A plain copy in this process's memory, laid out alike."""
        item = self._weight.item
        with torch.no_grad():
            return self.layout_in_store.spread(self.layout_in_store.lay_on(item.store.get(item.id)))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` on the weights themselves; a view is taken without them."""
        given = dict(kwargs or {})
        _refuse_writes(func, args, given)
        first = args[0] if args else None
        if isinstance(first, OffloadedWeight) and _is_view(func):
            return _view(func, first, args[1:], given)
        fetched: dict[int, torch.Tensor] = {}

        def plain(part: OffloadedWeight) -> torch.Tensor:
            if id(part) not in fetched:
                fetched[id(part)] = part.fetch()
            return fetched[id(part)]

        return func(*tree_map_only(OffloadedWeight, plain, args), **tree_map_only(OffloadedWeight, plain, given))

    def _no_memory(self, *_arguments: Any, **_named: Any) -> NoReturn:
        raise StoreError(
            f"'{self._weight.name}' is offloaded to a store and has no memory here: copy it with .clone(), or call "
            "remove() of the handle that offload returned"
        )

    data_ptr = untyped_storage = storage = numpy = __array__ = __dlpack__ = share_memory_ = _no_memory

    def tolist(self) -> Any:
        """Its numbers."""
        return self.fetch().tolist()

    @property
    def data(self) -> torch.Tensor:
        """Another view, as read-only as this one."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # module.to() assigns what it got from a weight that is as it should be.
        same = isinstance(value, OffloadedWeight) and value._weight is self._weight
        if not same or value.layout_in_store != self.layout_in_store:  # type: ignore[attr-defined]
            _refuse(self._weight.name, ".data")

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A copy of a module has a weight of its own, in its memory."""
        if id(self) not in memo:
            plain = self.copied()
            memo[id(self)] = torch.nn.Parameter(plain, requires_grad=False) if hasattr(self, "_is_param") else plain
        found: torch.Tensor = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files have the weight, and know nothing of a store."""
        return copy_of(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Without its content, which would have to be fetched."""
        return f"OffloadedWeight('{self._weight.name}', size={tuple(self.size())}, dtype={self.dtype})"


def copy_of(tensor: OffloadedWeight) -> torch.Tensor:
    """A plain tensor, or parameter, with its content."""
    return copy.deepcopy(tensor, {})


def _is_view(func: Any) -> bool:
    """Whether all that ``func`` returns shares memory with an argument, and nothing is written."""
    returned = func._schema.returns
    return bool(returned) and all(r.alias_info is not None and not r.alias_info.is_write for r in returned)


def _view(func: Any, part: OffloadedWeight, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The view that ``func`` takes of ``part``: what it would be is asked of a tensor without memory."""
    layout = part.layout_in_store
    elements = 1 + sum((n - 1) * s for n, s in zip(layout.size, layout.stride, strict=True))
    whole = torch.empty(layout.offset + max(0, elements), dtype=layout.dtype, device="meta")
    twin = whole.as_strided(layout.size, layout.stride, layout.offset)

    def of_the_weight(view: torch.Tensor) -> OffloadedWeight:
        there = Layout(view.dtype, tuple(view.size()), view.stride(), int(view.storage_offset()))
        return OffloadedWeight(part.weight, part._uses, there)

    return tree_map_only(torch.Tensor, of_the_weight, func(twin, *args, **kwargs))


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise StoreError if ``func`` writes to an offloaded weight."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, OffloadedWeight):
                _refuse(tensor.weight.name, func.__name__)


def _refuse(name: str, how: str) -> NoReturn:
    raise StoreError(
        f"'{name}' is offloaded to a store and read-only there, and {how} would write to it: call remove() of the "
        "handle that offload returned, change it, and offload again"
    )
