"""The frozen weights of a module in a store: ``handle = offload(store, module)``, and ``handle.remove()``."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map_only

from disco_accel.errors import ConfigError, StoreError, StoreFull
from disco_accel.native.backend import has_backend
from disco_accel.store.stored_object import (
    AHEAD,
    Layout,
    ObjectStore,
    StoredObject,
    bytes_in,
    layout_in,
    span_of,
    store_bytes,
    wait_for_frees,
)

MIN_BYTES = 1 << 16
"""Smaller weights stay: each use costs messages of a quarter of a millisecond."""


_MOST = 1 << 16
"""Uses after which a step counts as ended: nobody calls the module whose forward would begin the next."""


@dataclass(eq=False, slots=True)
class _Weight:
    """A weight in a store. ``name``: of the parameter. ``last``: its last use, as its step's gaps, the place of the
    use there, and its time."""

    name: str
    item: StoredObject
    layout: Layout
    last: tuple[list[float | None], int, float] | None = None


@dataclass(slots=True)
class _StepUses:
    """The weights used in a step in their order, and the seconds until each was used again, in this step or later."""

    weights: list[_Weight] = field(default_factory=list)
    gaps: list[float | None] = field(default_factory=list)


class _WeightUses:
    """The uses of a module's weights, from one forward of the module to the next. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now, self._before = _StepUses(), _StepUses()

    def begin_step(self) -> None:
        """The module's forward begins."""
        with self._lock:
            self._turn()

    def forget(self) -> None:
        """Drop all weights."""
        with self._lock:
            self._now, self._before = _StepUses(), _StepUses()

    def _turn(self) -> None:
        if self._now.weights:
            self._now, self._before = _StepUses(), self._now

    def use(self, weight: _Weight) -> tuple[float | None, list[_Weight]]:
        """``weight`` is used now. Returns the seconds until it is used again, None if that is not known, and weights to
        ask back now, which are used soon."""
        with self._lock:
            now = time.monotonic()
            if len(self._now.weights) >= _MOST:
                self._turn()
            place = len(self._now.weights)
            if weight.last is not None:
                gaps, there, then = weight.last
                gaps[there] = now - then
            self._now.weights.append(weight)
            self._now.gaps.append(None)
            weight.last = (self._now.gaps, place, now)
            before = self._before.weights
            if place >= len(before) or before[place] is not weight:
                return None, []
            # At the end of a step come those of the begin of the next. Nearer ones were asked back before.
            first = place + 1 if place == 0 else place + AHEAD
            soon = [before[n % len(before)] for n in range(first, place + AHEAD + 1)]
            return self._before.gaps[place], [w for w in dict.fromkeys(soon) if w is not weight]


class OffloadedWeight(torch.Tensor):
    """A weight of a store, or a view of one, that is read-only and holds no memory.

    It has the shape, strides and type of the weight, and PyTorch's kernels get the weight itself: fetched for that op
    alone. So autograd, which saves it for the backward, saves no memory either; nor does a checkpointed region. A view
    is another of these. A write to it is refused: nobody would see it.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _weight: _Weight
    _uses: _WeightUses

    @staticmethod
    def __new__(cls, weight: _Weight, uses: _WeightUses, layout: Layout) -> OffloadedWeight:
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

    def __init__(self, *_given: object) -> None:
        """See ``__new__``."""

    @property
    def layout_in_store(self) -> Layout:
        """How it lies in the weight's bytes."""
        return Layout(self.dtype, tuple(self.size()), self.stride(), int(self.storage_offset()))

    def fetch(self) -> torch.Tensor:
        """The weight itself, brought back if it was evicted: a plain tensor that stays while it lives. Not for hands
        that could write to it. Raises StoreFull, StoreGone: as ``Store.get``."""
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
            layout = self.layout_in_store
            content = layout.lay_on(item.store.get(item.id))
            return layout.empty(content.device).copy_(content)

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
        return self.fetch().tolist()

    @property
    def data(self) -> torch.Tensor:
        """Another view, as read-only as this one."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # module.to() assigns the result of a weight that is as it should be.
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
        return self.__deepcopy__({}).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Without its content, which would have to be fetched."""
        return f"OffloadedWeight('{self._weight.name}', size={tuple(self.size())}, dtype={self.dtype})"


def _is_view(func: Any) -> bool:
    """Whether all that ``func`` returns shares memory with an argument, and nothing is written."""
    returned = func._schema.returns
    return bool(returned) and all(r.alias_info is not None and not r.alias_info.is_write for r in returned)


def _view(func: Any, part: OffloadedWeight, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The view that ``func`` takes of ``part``, as it takes it of a tensor without memory."""

    def of_the_weight(view: torch.Tensor) -> OffloadedWeight:
        there = Layout(view.dtype, tuple(view.size()), view.stride(), int(view.storage_offset()))
        return OffloadedWeight(part._weight, part._uses, there)

    return tree_map_only(torch.Tensor, of_the_weight, func(part.layout_in_store.empty("meta"), *args, **kwargs))


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise StoreError if ``func`` writes to an offloaded weight."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, OffloadedWeight):
                _refuse(tensor._weight.name, func.__name__)


def _refuse(name: str, how: str) -> NoReturn:
    raise StoreError(
        f"'{name}' is offloaded to a store and read-only there, and {how} would write to it: call remove() of the "
        "handle that offload returned, change it, and offload again"
    )


class _Begin:
    """A forward pre-hook of the module: a step begins. A copy of the module, or one from a file, has plain weights and
    a hook that does nothing."""

    def __init__(self, uses: _WeightUses | None = None) -> None:
        self._uses = uses

    def __call__(self, _module: torch.nn.Module, _args: Any) -> None:
        if self._uses is not None:
            self._uses.begin_step()

    def __reduce__(self) -> tuple[type[_Begin], tuple[()]]:
        return _Begin, ()


class Offloaded:
    """The handle of a module whose weights were offloaded. ``names``: of the weights that are in the store."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._uses = _WeightUses()
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._hook = module.register_forward_pre_hook(_Begin(self._uses))

    @property
    def names(self) -> list[str]:
        """Of the parameters in the store, in the module's order; a shared one once."""
        return list(self._parameters)

    def remove(self) -> None:
        """Bring the weights back to this process's memory, of the store's device. Parameters that were replaced since
        stay as they are.

        Raises:
            StoreGone: the store has ended, and with it the weights: load them again from where they came.
            StoreFull: no weight finds room to come back; drop tensors that hold objects, and call again.
            StoreError: a graph holds a weight: do the backward first, or drop the graph. Weights that came back stay;
                call again for the rest.
        """
        self._uses.forget()
        left = self.names
        while left:
            # The last is the likeliest to be on the device: one that is not may find no room before others are gone.
            again = [name for name in reversed(left) if not self._restore(name, last=len(left) == 1)]
            if len(again) == len(left):
                left = left[-1:]
                continue
            left = again[::-1]
        self._hook.remove()

    def __enter__(self) -> Offloaded:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.remove()

    def _restore(self, name: str, last: bool) -> bool:
        """Bring one back; False where the store has no room for it now, an error if it is the ``last`` to be tried."""
        parameter = self._parameters[name]
        if isinstance(parameter, OffloadedWeight):
            store = parameter._weight.item.store
            try:
                plain = torch.nn.Parameter(parameter.copied(), requires_grad=False)
            except StoreFull:
                if last:
                    raise
                return False
            _swap(name, parameter, plain)
            del plain
            wait_for_frees(store)
        del self._parameters[name]
        return True

    def _store(self, store: ObjectStore, name: str, parameter: torch.nn.Parameter) -> None:
        """Move one parameter: all its holders hold one that is in the store."""
        with torch.no_grad():
            span = span_of(parameter)
            item, _memory = store_bytes(store, bytes_in(parameter, span))
        layout = layout_in(parameter, span)
        made = OffloadedWeight(_Weight(name, item, layout), self._uses, layout)
        # isinstance(..., Parameter) asks for it in tensors of other classes.
        made._is_param = True
        _swap(name, parameter, made)
        self._parameters[name] = parameter


def offload(store: ObjectStore, module: torch.nn.Module, *, min_bytes: int = MIN_BYTES) -> Offloaded:
    """Move the frozen parameters of ``module`` from ``min_bytes`` bytes on to ``store``.

    Each op that reads one fetches it, in forward, backward and recomputation, and drops it; in between it may be
    evicted. From the second forward of ``module`` on, it is announced with the time after which it was used again in
    the step before, and asked back some uses ahead in the order of that step. Trained parameters, small ones and
    buffers stay. Parameters that several modules share are moved once, and all holders of a parameter, an optimizer
    too, hold the moved one. Bits are those without.

    Until ``remove``, the weights are read-only (StoreError), and exist in the store alone.

    Raises:
        ConfigError: a parameter cannot be moved, by name, with the reason: nothing was.
        StoreFull: as ``Store.create``; nothing was moved.
        StoreGone: the store has ended, and with it the weights that were moved by then.
    """
    if min_bytes < 1:
        raise ConfigError(f"min_bytes: {min_bytes} is not a number of bytes from 1 on")
    moving = {n: p for n, p in module.named_parameters() if not p.requires_grad and p.nbytes >= min_bytes}
    for name, parameter in moving.items():
        _check(name, parameter, store.device)
    _check_overlaps(module, set(moving))
    handle = Offloaded(module)
    try:
        for name, parameter in moving.items():
            handle._store(store, name, parameter)
    except BaseException:
        handle.remove()
        raise
    return handle


def _check(name: str, parameter: torch.nn.Parameter, there: torch.device) -> None:
    """Raise ConfigError if this parameter cannot be moved to a store whose device is ``there``."""
    reason = None
    if isinstance(parameter, OffloadedWeight):
        reason = "is offloaded already: call remove() of that handle first"
    elif type(parameter) is not torch.nn.Parameter:
        reason = f"is a {type(parameter).__name__}, whose memory only its library knows"
    elif parameter.layout is not torch.strided:
        reason = f"is {parameter.layout}; a store takes dense tensors alone"
    elif parameter.device != there:
        reason = (
            f"is on {parameter.device}, and the store's device is {there}: move the module there first, or serve a "
            "store of that kind (--device-kind)"
        )
    elif parameter.is_complex():
        reason = "is complex, whose conjugates are views that a store does not know"
    elif parameter._is_view():
        reason = "is a view of another tensor, which would keep its memory and its writes to itself"
    elif parameter.grad is not None:
        reason = "has a gradient: set it to None first"
    if reason is not None:
        raise ConfigError(f"offload: parameter '{name}' {reason}")


def _check_overlaps(module: torch.nn.Module, moving: set[str]) -> None:
    """Raise ConfigError if a parameter that moves shares bytes with one that is another."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    # Addresses of host memory and of GPUs are apart.
    plain = {
        n: t for n, t in tensors.items() if has_backend(t.device) and type(t) in (torch.Tensor, torch.nn.Parameter)
    }
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, n) for n, t in plain.items() if t.nbytes)
    end, last = 0, ""
    for begin, stop, name in spans:
        if begin < end and (name in moving or last in moving):
            raise ConfigError(
                f"offload: parameter '{name}' shares memory with '{last}', and writes to one would be missed by the "
                "other: make them one parameter, or clone one"
            )
        if stop > end:
            end, last = stop, name


def _swap(name: str, parameter: torch.nn.Parameter, other: torch.Tensor) -> None:
    """Make ``parameter``, for all its holders, the same as ``other``, with its own further attributes."""
    ours = {"_weight", "_uses", "_is_param"}
    kept = {key: value for key, value in parameter.__dict__.items() if key not in ours}
    other.__dict__.update(kept)
    try:
        torch.utils.swap_tensors(parameter, other)
    except RuntimeError as error:
        raise StoreError(
            f"offload: parameter '{name}' is held by a graph, or by a weak reference such as torch.compile's, and "
            "cannot be moved now: do the backward or drop the graph first, or call torch._dynamo.reset() "
            f"(said PyTorch: {error})"
        ) from error
