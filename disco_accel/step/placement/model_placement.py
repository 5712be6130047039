"""Where a prepared model's tensors live: frozen ones on the host, trained ones there too or on the device that steps
run on."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from disco_accel.capture.parts import beside_weights, frozen_parts, named_parts, settle_states
from disco_accel.errors import ConfigError
from disco_accel.host_limits import own_bytes
from disco_accel.native.backend import backend_of
from disco_accel.native.file_arena import FileArena
from disco_accel.native.host_memory import HostMemory, give_back_freed
from disco_accel.native.out_of_memory import typed_out_of_memory
from disco_accel.step.placement.distributed import (
    FrozenSharing,
    check_not_sharded,
    check_same,
    exclude_from_collectives,
    frozen_tensors,
    include_again,
)
from disco_accel.step.placement.pinned_tensors import PinnedTensors
from disco_accel.step.placement.streamed_eager import StreamedEager, own_leaves, source_of, visitor_of
from disco_accel.step.placement.trained_weights import movable_weights, set_aside_adapters, unwatch_updates_of
from disco_accel.step.placement.unplanned import UnplannedMemory
from disco_accel.step.state.plain_tensors import follows_autograd, make_ordinary, move_views, plain_tensors

_ARENA = "_disco_host_memory"
_A_TENSOR = "a tensor in an attribute of a module"
_MOST_FREED = 256 << 20
"""Bytes of weights' old copies that may stay in the heap after they were freed."""


def keep_arena(model: torch.nn.Module, memory: HostMemory) -> None:
    """Note on ``model`` that its weights were loaded into ``memory``, so that ``prepare`` uses them where they are."""
    model.__dict__[_ARENA] = memory


class Placement:
    """Puts the tensors of ``model`` where planned steps on ``device`` need them, and back."""

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        *,
        trained_on_host: bool = False,
        sharing: FrozenSharing | None = None,
        unplanned: UnplannedMemory | None = None,
    ) -> None:
        """``trained_on_host``: trained weights, gradients and the optimizer's state live on the host. ``sharing`` puts
        frozen weights into memory that processes share. ``unplanned``: the device's memory for forwards without a
        plan; without it each weight is copied when it is read."""
        self._model, self._device = weakref.ref(model), device
        self._trained_on_host, self._sharing = trained_on_host, sharing
        if trained_on_host:
            unwatch_updates_of(self.holds)
        # Held here, because an arena is pinned only as long as somebody holds it.
        self._arenas: list[HostMemory] = [m.__dict__[_ARENA] for m in model.modules() if _ARENA in m.__dict__]
        self._moved: dict[int, tuple[weakref.ref[torch.Tensor], torch.device]] = {}
        """By id: each tensor that was moved, and its first device."""
        self._pinned = PinnedTensors(device)
        self._streamed: StreamedEager | None = None
        self._unplanned = unplanned
        self._freed = 0
        """Bytes of old copies that were given up since ``give_back_freed``."""
        self._excluded = False
        """Whether collectives leave frozen weights alone."""

    @property
    def model(self) -> torch.nn.Module | None:
        return self._model()

    @property
    def visitors(self) -> Mapping[int, torch.Tensor]:
        """Address of a visiting tensor's storage → the tensor that it is a copy of."""
        return {} if self._streamed is None else self._streamed.visits.addresses

    @contextlib.contextmanager
    def visiting(self) -> Iterator[None]:
        """Around a forward of the model's own: as ``StreamedEager.visiting`` where tensors visit a device."""
        model = self._model()
        assert model is not None
        with contextlib.ExitStack() as stack:
            stack.enter_context(kept_order(model))
            if self._streamed is not None:
                if self._unplanned is not None:
                    stack.enter_context(self._unplanned.forward())
                stack.enter_context(self._streamed.visiting(model))
            yield

    def give_way(self) -> None:
        """A plan is about to take the device's memory, in which visitors may have stayed."""
        if self._streamed is not None and self._streamed.visits.ring is not None:
            self._streamed.visits.ring.give_way()

    def stats(self) -> dict[str, int]:
        """Bytes on a device with memory of its own at most, in forwards without a plan."""
        if self._streamed is None or self._unplanned is None:
            return {}
        return {"unplanned_peak_bytes": self._unplanned.peak}

    def batch(self, arguments: Any) -> Any:
        """The arguments of a forward of the model's own, on the device if all tensors in them are on the host; as they
        are where nothing visits."""
        return arguments if self._streamed is None else self._streamed.visits.batch(arguments)

    def hidden(self) -> AbstractContextManager[None]:
        """Around code that reads tensors where they are, such as a plan, perhaps within the forward of a module."""
        return contextlib.nullcontext() if self._streamed is None else self._streamed.visits.hidden()

    def apply(self) -> None:
        """Move frozen weights and buffers to the host, trained weights there or to the device.

        Weights that were loaded into an arena stay there. The others are copied one at a time and each old copy is
        given up at once, so that no second copy of the model ever exists. Tied weights stay tied.
        """
        model = self._model()
        assert model is not None
        plain = [tensor for tensor in plain_tensors(model) if tensor.device == self._device]
        self._share_loaded(model)
        self.gather()
        separate = backend_of(self._device).separate_memory
        if separate:
            self._move_rest(model)
        if separate or self._sharing is not None:
            self._excluded = True
            # A broadcast would write to each weight, which gives each process a copy of its own.
            exclude_from_collectives(model)
            check_same(frozen_tensors(model), self._device)
        if separate:
            # Views of weights and buffers, which have gone to the host with those.
            visiting = [tensor for tensor in plain if tensor.device != self._device]
            visitor = self.visitor()
            seen = functools.partial(source_of, visitor)
            ring = None if self._unplanned is None else self._unplanned.ring(own_leaves(model), seen)
            self._streamed = StreamedEager(model, visitor, visiting, ring)
            model._apply = functools.partial(  # type: ignore[method-assign]
                apply_to_trainable, model, trained_on_host=self._trained_on_host
            )

    def take_unfrozen(self, trained: Iterable[torch.nn.Parameter]) -> None:
        """Those of ``trained`` that were unfrozen since ``apply``, still in host memory, go to the device."""
        model = self._model()
        if model is None or self._streamed is None or self._trained_on_host:
            return
        unfrozen = [parameter for parameter in trained if parameter.device != self._device]
        views = _views(model) if unfrozen else []
        for parameter in unfrozen:
            self._move_with(views, parameter, parameter.data.to(self._device))

    def _move_rest(self, model: torch.nn.Module) -> None:
        """Trained weights go to the device unless they live on the host, buffers to the host."""
        for parameter in model.parameters():
            if not self._trained_on_host and parameter.requires_grad and parameter.device != self._device:
                self._move(parameter, parameter.data.to(self._device))
        for module in model.modules():
            for name, buffer in module._buffers.items():
                # What cannot be moved as it is, such as a sparse one.
                module._buffers[name] = None if buffer is None else buffer.cpu()

    @typed_out_of_memory("moving the frozen weights into one piece of host memory")
    def gather(self, constants: Iterable[torch.Tensor] = ()) -> None:
        """Move weights of the host's that lie outside the host arenas into one: all of them at first, later those that
        a cast such as DeepSpeed's has replaced. For a GPU also buffers, tensors in attributes, and ``constants`` of a
        step. Without gradients adapters that are set aside stay: a training step under way may go on with them.

        Raises:
            ConfigError: ZeRO stage 3 has sharded a weight; a trained one was made under ``torch.inference_mode``.
        """
        model = self._model()
        assert model is not None
        settle_states(model)
        _make_ordinary(model)
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                check_not_sharded(name, parameter)
        self.leave_written(model)
        aside = set() if torch.is_grad_enabled() else set_aside_adapters(model)
        on_host = [tensor for tensor in frozen_parts(model).values() if id(tensor) not in aside]
        if self._trained_on_host:
            on_host += movable_weights(model, self.holds)
        outside_arenas = [t for t in on_host if not self.holds(t)]
        if outside_arenas:
            self._arenas = [arena for arena in self._arenas if any(arena.holds(t) for t in on_host)]
        views = _views(model) if outside_arenas else []
        to_copy = self._share(outside_arenas, views)
        if to_copy:
            room = HostMemory.room_for(to_copy)
            memory = HostMemory(room, replaced=own_bytes(), gpu=self._device)
            self._arenas.append(memory)
            places = [memory.place_for(tensor.data) for tensor in to_copy]
            if backend_of(self._device).separate_memory:
                # Before the copies, so that weights that are on a GPU come down at the link's speed.
                memory.pin(self._device)
            for tensor, place in zip(to_copy, places, strict=True):
                with torch.no_grad():
                    place.copy_(tensor.data)
                self._move_with(views, tensor, place)
        if outside_arenas:
            give_back_freed()
        if backend_of(self._device).separate_memory:
            for memory in self._arenas:
                memory.pin(self._device)
            plain = [t for t in (*plain_tensors(model), *constants) if not self.holds(t)]
            self._pinned.gather([b for b in model.buffers() if not self.holds(b)], plain)

    def visitor(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """For ``StreamedEager``: a copy on the device, of the values that this process sees."""
        shared = self._sharing is not None or bool(self.shared_arenas())
        return visitor_of(self._device, self.shared_arenas if shared else None)

    def _share(self, tensors: list[torch.Tensor], views: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those of ``tensors`` that are not in shared memory now."""
        if self._sharing is None or not tensors:
            return tensors
        frozen = [t for t in tensors if not t.requires_grad]
        arena = self._sharing.gather(frozen, functools.partial(self._move_with, views)) if frozen else None
        if arena is None:
            return tensors
        self._arenas.append(arena)
        return [t for t in tensors if not arena.holds(t)]

    def _share_loaded(self, model: torch.nn.Module) -> None:
        """Weights that were loaded into an arena of this process's own go to shared memory, and it is given up."""
        own = self.own_arenas()
        loaded = [t for t in frozen_parts(model).values() if any(arena.holds(t) for arena in own)]
        if self._sharing is None or not loaded or len(self._share(loaded, _views(model))) == len(loaded):
            return
        others = [part.tensor for part in named_parts(model)]
        given_up = [arena for arena in own if not any(arena.holds(t) for t in others)]
        self._arenas = [arena for arena in self._arenas if arena not in given_up]
        for module in model.modules():
            if module.__dict__.get(_ARENA) in given_up:
                del module.__dict__[_ARENA]

    def _move_with(self, views: list[torch.Tensor], tensor: torch.Tensor, data: torch.Tensor) -> None:
        if self._freed > _MOST_FREED:
            self._freed = 0
            give_back_freed()
        old = tensor.data
        self._move(tensor, data)
        move_views(views, old, tensor.data)
        self._freed += old.nbytes

    def own_arenas(self) -> list[HostMemory]:
        """Those that are this process's alone."""
        return [arena for arena in self._arenas if not isinstance(arena, FileArena)]

    def shared_arenas(self) -> list[FileArena]:
        """Those whose pages other processes may map too."""
        return [arena for arena in self._arenas if isinstance(arena, FileArena)]

    def leave_written(self, model: torch.nn.Module) -> None:
        """As ``note_writes``, before a device with memory of its own loads weights; else nothing."""
        if backend_of(self._device).separate_memory:
            self.note_writes(model)

    def note_writes(self, model: torch.nn.Module) -> None:
        """This process has written to weights, or may have: say so once of those that it shares.

        On a device with memory of its own they move to memory of this process's own: the pages that all share are still
        the ones that are page-locked.
        """
        for arena in self.shared_arenas():
            named = {part.name: part.tensor for part in named_parts(model) if arena.holds(part.tensor)}
            differs = arena.differs(list(named.values()))
            written = {name: part for (name, part), other in zip(named.items(), differs, strict=True) if other}
            if self._sharing is not None:
                self._sharing.tell_written(arena, list(written))
            if not written or not backend_of(self._device).separate_memory:
                continue
            views, own = _views(model), HostMemory(HostMemory.room_for(list(written.values())), gpu=self._device)
            self._arenas.append(own)
            for tensor in written.values():
                self._move_with(views, tensor, own.adopt(tensor.data))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it is a weight in a host arena, or a view of one."""
        return any(arena.holds(tensor) for arena in self._arenas)

    def _move(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        before = self._moved.get(id(tensor))
        if before is None or before[0]() is not tensor:
            self._moved[id(tensor)] = weakref.ref(tensor), tensor.device
        _place(tensor, data)

    def undo(self) -> None:
        """Give each tensor that ``apply`` moved a storage of its own where it was, values kept."""
        model = self._model()
        if self._streamed is not None:
            self._streamed.remove(model)
            self._streamed = None
            if model is not None:
                del model.__dict__["_apply"]
        if self._excluded and model is not None:
            include_again(model)
        self._excluded = False
        views = _views(model) if model is not None else []
        for reference, device in self._moved.values():
            tensor = reference()
            if tensor is not None:
                old = tensor.data
                _place(tensor, old.to(device, copy=True))
                move_views(views, old, tensor.data)
        self._moved.clear()
        self._pinned.undo()


def _make_ordinary(model: torch.nn.Module) -> None:
    """Tensors made under ``torch.inference_mode``, as some packed weights are, become ordinary ones."""
    named = [*model.named_parameters(), *((part.name, part.tensor) for part in named_parts(model))]
    for name, tensor in (*named, *((_A_TENSOR, t) for t in _views(model))):
        if follows_autograd(tensor):
            continue
        if tensor.requires_grad:
            raise ConfigError(
                f"{name} was made under torch.inference_mode, so that PyTorch cannot train it; freeze it "
                "(requires_grad_(False)) or make the model outside of torch.inference_mode"
            )
        make_ordinary(tensor, name)


def _place(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Give ``tensor`` the memory of ``data``, and its gradient memory on the same device."""
    tensor.data = data
    if tensor.grad is not None and tensor.grad.device != tensor.device:
        tensor.grad.data = tensor.grad.data.to(tensor.device)


def _views(model: torch.nn.Module) -> list[torch.Tensor]:
    """Tensors that may be views of a weight."""
    return [*plain_tensors(model), *beside_weights(model), *model.buffers()]


def apply_to_trainable(
    model: torch.nn.Module,
    fn: Callable[[torch.Tensor], torch.Tensor],
    recurse: bool = True,
    *,
    trained_on_host: bool = False,
) -> torch.nn.Module:
    """As ``Module._apply`` for ``.to(device)`` and its kin, with frozen weights and buffers left on the host; trained
    ones too if they live there, of which another dtype is followed.

    Raises:
        ConfigError: ``fn`` changes the dtype of frozen weights.
    """
    for dtype in {p.dtype for p in model.parameters() if not p.requires_grad}:
        changed = fn(torch.empty(0, dtype=dtype)).dtype
        if changed is not dtype:
            raise ConfigError(
                f"the frozen weights of a prepared model cannot become {changed}; "
                "call restore(model), convert it, then prepare(model) again"
            )
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue
            if trained_on_host and fn(torch.empty(0, dtype=parameter.dtype)).dtype is parameter.dtype:
                continue
            for tensor in (parameter, parameter.grad):
                if tensor is not None:
                    changed_data = fn(tensor.data)
                    tensor.data = changed_data.cpu() if trained_on_host else changed_data
    return model


@contextlib.contextmanager
def kept_order(model: torch.nn.Module) -> Iterator[None]:
    """Parameters and buffers are in the same order in their tables at the end of a forward as before it.

    A forward that takes one out and puts it back, as parametrisation does (PEFT's ``target_parameters``), puts it at
    the end. Steps that plans run have no such effect, so that a forward beside them must not either.
    """
    tables: list[dict[str, Any]] = [t for m in model.modules() for t in (m._parameters, m._buffers) if len(t) > 1]
    orders = [list(table) for table in tables]
    try:
        yield
    finally:
        for table, order in zip(tables, orders, strict=True):
            now = list(table)
            if now != order and sorted(now) == sorted(order):
                for name in order:
                    # Past the methods of a table that a device's visitors are read from.
                    dict.__setitem__(table, name, dict.pop(table, name))
