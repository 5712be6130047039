"""Copies on a device of tensors of the host while forwards run: a visitor for each tensor that a forward has read."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from disco_accel.capture.parts import rebuilt
from disco_accel.step.placement.kept_copies import kept_copies
from disco_accel.step.placement.weight_ring import WeightRing
from disco_accel.step.state.forward_code import pure
from disco_accel.step.state.plain_tensors import replaced_tensors

Visit = Callable[[torch.Tensor], torch.Tensor]
"""A tensor as a forward needs it; the same object where it lies right already."""
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
TABLES = ("_parameters", "_buffers")
_DATA: Any = torch._C.TensorBase.data


class _Visitor(torch.Tensor):
    """A copy of ``home``, to which PyTorch's functions are those of a plain tensor.

    No count of versions tells of ``.data`` and ``.grad``: an assignment goes home at once, and ``written`` says that
    bytes may have changed.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    home: torch.Tensor
    written: bool

    @classmethod
    def of(cls, home: torch.Tensor, copy: torch.Tensor) -> _Visitor:
        """``copy`` as the visitor of ``home``, with the same way back for gradients."""
        made: Any = copy.as_subclass(cls) if copy.requires_grad else torch.Tensor._make_subclass(cls, copy)
        made.home, made.written = home, False
        return made  # type: ignore[no-any-return]

    @property
    def data(self) -> torch.Tensor:
        """Bytes that may be written to."""
        self.written = True
        return _DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _DATA.__set__(self, value)
        self.home.data = value.detach().to(self.home.device)

    @property
    def grad(self) -> torch.Tensor | None:
        return self.home.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.home.grad = value


class _Arrived(torch.autograd.Function):
    """A copy that is there already, with the way back that the gradient of a copy has."""

    @staticmethod
    def forward(ctx: Any, home: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        ctx.device = home.device
        return _DATA.__get__(copy)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].to(ctx.device), None


@dataclass(slots=True)
class _Leaf:
    """A plain tensor of the host's, its visitor, and that one's count of writes when both last had the same bytes."""

    home: torch.Tensor
    visitor: torch.Tensor
    version: int
    address: int

    def settle(self) -> bool:
        """Whether a forward has written to the visitor since; then its home has the new bytes."""
        if self.visitor._version == self.version and not getattr(self.visitor, "written", False):
            return False
        self.version = self.visitor._version
        if isinstance(self.visitor, _Visitor):
            self.visitor.written = False
        now = _DATA.__get__(self.visitor).to(self.home.device)
        if torch.equal(now, _DATA.__get__(self.home)):
            return False
        with torch.no_grad():
            self.home.copy_(now)
        return True


@dataclass(slots=True)
class _Brought:
    """The visitor of ``home``, a tensor or a tree of such, and the plain tensors in it that are visitors."""

    home: Any
    visitor: Any
    leaves: list[_Leaf]

    def settle(self) -> bool:
        """Whether a forward has written to it since it was last the same as ``home``; then ``home`` gets that."""
        return any([leaf.settle() for leaf in self.leaves])


@dataclass(frozen=True, slots=True)
class _Swapped:
    """Entry ``key`` of the attributes of a module: ``visitor`` for the length of a forward, ``home`` otherwise."""

    attributes: dict[str, Any]
    key: str
    home: Any
    visitor: Any


@dataclass(slots=True)
class _Scope:
    """Visitors of one forward of ``owner``, by identity and by whether gradients find back."""

    owner: object
    frame: FrameType | None = None
    """The call of the outermost forward, if nothing tells of its end when it is interrupted."""
    brought: dict[tuple[int, bool], _Brought] = field(default_factory=dict)
    swapped: list[_Swapped] = field(default_factory=list)
    taken: list[tuple[dict[str, Any], dict[str, Any], str, torch.Tensor]] = field(default_factory=list)
    """Entries that the forward has taken out of a table: the table, its module's attributes, name, tensor."""


def _runs(frame: FrameType) -> bool:
    """Whether the caller was called from ``frame``, directly or not."""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None


class Visits:
    """The visitors of one model. Each thread has its own, which live as long as the innermost forward that runs there
    when they are first read: all reads within it get the same ones."""

    def __init__(
        self,
        visit: Visit,
        model: torch.nn.Module | None = None,
        plain: Iterable[torch.Tensor] = (),
        ring: WeightRing | None = None,
    ) -> None:
        """``plain``: tensors that visit where attributes of modules of ``model`` hold them, as weights and buffers do
        that are held so. ``ring``: copies ahead, where ``visit`` copies at the read."""
        self.ring = ring
        self.addresses: dict[int, torch.Tensor] = {}
        """Address of a visitor's storage → the tensor that it is a copy of."""
        self._visit = visit
        self._thread = threading.local()
        held = [] if model is None else [*model.parameters(), *model.buffers(), *plain]
        self._held = {id(tensor): weakref.ref(tensor) for tensor in held}
        self._holders = [
            (vars(module), key)
            for module in (model.modules() if model is not None else ())
            for key, value in vars(module).items()
            if key not in (*TABLES, "_modules") and replaced_tensors(value, self._unless_held) is not value
        ]
        """Attributes that hold such a tensor, also in lists, tuples and dicts."""

    def _unless_held(self, tensor: torch.Tensor) -> torch.Tensor | None:
        reference = self._held.get(id(tensor))
        return tensor if reference is None or reference() is not tensor else None

    def _of_attribute(self, tensor: torch.Tensor) -> Any:
        return self.bring(tensor) if self._unless_held(tensor) is None else tensor

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model has weights of its own, and no ring.
        return type(self), (self._visit,)

    @property
    def _my_ring(self) -> WeightRing | None:
        """The ring, if the forward that runs in this thread has it."""
        return self.ring if self.ring is not None and self.ring.mine and not self._is_hidden else None

    @property
    def _is_hidden(self) -> bool:
        return getattr(self._thread, "is_hidden", False)

    @property
    def scopes(self) -> list[_Scope]:
        """Of the forwards that run in this thread, the innermost last."""
        scopes: list[_Scope] | None = getattr(self._thread, "scopes", None)
        if scopes is None:
            scopes = self._thread.scopes = []
        elif scopes and (frame := scopes[0].frame) is not None and not _runs(frame):
            # Ctrl-C has ended the forward past the hooks of its module.
            self._leave_from(scopes, 0, whole=False)
        return scopes

    def enter(self, owner: object, frame: FrameType | None = None) -> None:
        """A forward of ``owner`` begins in this thread; a capture's has tensors without bytes, for which none visit.
        ``frame``: the call of it, where ``leave`` may be left out when it is interrupted."""
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return
        scopes = self.scopes
        scopes.append(_Scope(owner, None if scopes else frame))
        if len(scopes) == 1:
            if self.ring is not None and not self._is_hidden:
                self.ring.begin(owner, forward=isinstance(owner, torch.nn.Module))
            for attributes, key in self._holders:
                if key in attributes:
                    self.swap(attributes, key, replaced_tensors(attributes[key], self._of_attribute))

    def batch(self, arguments: Any) -> Any:
        """``arguments`` of the outermost forward in this thread, brought too if all tensors in them are on the host."""
        tensors: list[torch.Tensor] = []

        def collected(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor)
            return tensor

        replaced_tensors(arguments, collected)
        if self.scopes or not tensors or not all(tensor.is_cpu for tensor in tensors):
            return arguments
        return replaced_tensors(arguments, self._visit)

    def leave(self, owner: object, *, whole: bool = True, output: Any = None) -> None:
        """The innermost forward of ``owner`` ends, and those in it that were interrupted: writes to visitors go home.
        ``whole``: no exception ends it. ``output``: what it returns."""
        scopes = self.scopes
        place = next((place for place in reversed(range(len(scopes))) if scopes[place].owner is owner), None)
        if place is not None:
            self._leave_from(scopes, place, whole=whole, output=output)

    def _leave_from(self, scopes: list[_Scope], place: int, *, whole: bool, output: Any = None) -> None:
        forward = isinstance(scopes[0].owner, torch.nn.Module)
        try:
            while len(scopes) > place:
                self._leave_innermost(scopes, output)
        finally:
            if not scopes and (ring := self._my_ring) is not None:
                ring.end(forward=forward, whole=whole)

    def _leave_innermost(self, scopes: list[_Scope], output: Any) -> None:
        homes, kept = list[torch.Tensor](), list[Callable[[], object]]()
        try:
            if self._my_ring is not None and output is not None:
                kept = kept_copies(output, self._own_addresses(scopes[-1]), self.read_again)
            homes = self._take_off(scopes[-1])
        finally:
            # Nothing here refers to visitors any more, so that the ring sees who else does.
            scopes.pop()
            for go_home in kept:
                go_home()
            if (ring := self._my_ring) is not None:
                for home in homes:
                    ring.give_back(home)

    def _own_addresses(self, scope: _Scope) -> dict[int, torch.Tensor]:
        """Of the visitors of packed weights, some of which libraries keep beside the graph, out of autograd's sight."""
        return {
            leaf.address: leaf.home
            for brought in scope.brought.values()
            if type(brought.home) not in _PLAIN
            for leaf in brought.leaves
        }

    def _take_off(self, scope: _Scope) -> list[torch.Tensor]:
        """Put everything back; returns the tensors whose visitors ``scope`` had."""
        for swapped in reversed(scope.swapped):
            if swapped.attributes.get(swapped.key) is swapped.visitor:
                swapped.attributes[swapped.key] = swapped.home
        for brought in scope.brought.values():
            self._drop(brought)
        for table, attributes, name, home in scope.taken:
            # Put back as an attribute, which hides an entry of a table.
            if isinstance(attributes.get(name), _Visitor) and attributes[name].home is home:
                del attributes[name]
                dict.__setitem__(table, name, home)
        return [leaf.home for brought in scope.brought.values() for leaf in brought.leaves]

    @contextmanager
    def forward(self, owner: object) -> Iterator[None]:
        self.enter(owner)
        whole = False
        try:
            yield
            whole = True
        finally:
            self.leave(owner, whole=whole)

    def read_again(self, home: torch.Tensor) -> torch.Tensor:
        """The bytes of ``home`` for a backward, without a way back for gradients."""
        found = None if self.ring is None else self.ring.read_again(home)
        return self._visit(home.detach()) if found is None else found

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside, this thread reads the tensors themselves, as a plan does, though forwards run around."""
        scopes = self.scopes
        swapped = [swap for scope in scopes for swap in scope.swapped]
        for scope in scopes:
            for brought in scope.brought.values():
                brought.settle()
        for swap in reversed(swapped):
            swap.attributes[swap.key] = swap.home
        before = self._is_hidden
        # A forward in there, as of another kind of step, is none of those that the ring follows.
        self._thread.scopes, self._thread.is_hidden = [], before or bool(scopes)
        try:
            yield
        finally:
            self._thread.scopes, self._thread.is_hidden = scopes, before
            for swap in swapped:
                swap.attributes[swap.key] = swap.visitor

    def swap(self, attributes: dict[str, Any], key: str, visitor: Any) -> None:
        """Put ``visitor`` in the place of entry ``key`` of a module's attributes until the innermost forward ends."""
        if visitor is not attributes[key]:
            self.scopes[-1].swapped.append(_Swapped(attributes, key, attributes[key], visitor))
            attributes[key] = visitor

    def bring(self, home: Any, rebuild: Callable[[Any, Visit], Any] = rebuilt, *, written: bool = False) -> Any:
        """The tensor that a forward in this thread reads in the place of ``home``; ``home`` itself where none runs.

        ``written``: the forward may write to it in a way that no count of versions tells of.
        """
        scopes = self.scopes
        if not scopes or home is None:
            return home
        wants_grad = torch.is_grad_enabled() and getattr(home, "requires_grad", False)
        other = self._find(home, not wants_grad)
        # What was written to the other one, the one that this reading wants has not seen.
        stale = other is not None and other.settle()
        if stale and (old := self._find(home, wants_grad, take=True)) is not None:
            self._drop(old)
        known = self._find(home, wants_grad)
        if known is None:
            known = self._brought(home, rebuild)
            if not known.leaves:
                return home
            scopes[-1].brought[id(home), wants_grad] = known
        if written and isinstance(known.visitor, _Visitor):
            known.visitor.written = True
        return known.visitor

    def home_of(self, value: Any) -> Any:
        """The tensor that ``value`` visits for; ``value`` itself if it visits for none."""
        if isinstance(value, _Visitor):
            return value.home
        for scope in self.scopes:
            for brought in scope.brought.values():
                if brought.visitor is value:
                    return brought.home
        return value

    def _find(self, home: Any, wants_grad: bool, *, take: bool = False) -> _Brought | None:
        key = id(home), wants_grad
        for scope in reversed(self.scopes):
            if key in scope.brought:
                return scope.brought.pop(key) if take else scope.brought[key]
        return None

    def _brought(self, home: Any, rebuild: Callable[[Any, Visit], Any]) -> _Brought:
        leaves: list[_Leaf] = []
        # A visitor counts what is written to it, which tensors of inference mode do not.
        grad = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(grad):
            visitor = rebuild(home, lambda leaf: self._of_leaf(leaf, leaves))
        return _Brought(home, visitor, leaves)

    def _of_leaf(self, leaf: torch.Tensor, leaves: list[_Leaf]) -> torch.Tensor:
        visitor = self._copied(leaf)
        if visitor is leaf:
            return leaf
        if type(leaf) in _PLAIN:
            visitor = _Visitor.of(leaf, visitor)
        leaves.append(_Leaf(leaf, visitor, visitor._version, visitor.untyped_storage().data_ptr()))
        if visitor.numel():
            self.addresses[leaves[-1].address] = leaf
        return visitor

    def _copied(self, leaf: torch.Tensor) -> torch.Tensor:
        data = None
        if (ring := self._my_ring) is not None and torch._C._functorch.peek_interpreter_stack() is None:
            data = ring.read(leaf)
        if data is None:
            return self._visit(leaf)
        arrived: torch.Tensor = data
        if leaf.requires_grad and torch.is_grad_enabled():
            arrived = _Arrived.apply(leaf, data)  # type: ignore[no-untyped-call]
        return arrived

    def _drop(self, brought: _Brought) -> None:
        brought.settle()
        for leaf in brought.leaves:
            self.addresses.pop(leaf.address, None)


# Hooks lead to it, and what one has brought is no state of the model.
pure(Visits)
