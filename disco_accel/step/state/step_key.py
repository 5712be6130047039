"""What a captured step depends on: a key that changes whenever its graph could."""

from __future__ import annotations

import itertools
import types
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from disco_accel.capture.fake_inputs import PER_STEP_NUMBERS, batch_tensors
from disco_accel.capture.parts import settle_states
from disco_accel.errors import CaptureError
from disco_accel.native.change_watch import ExecutedCode, no_zero
from disco_accel.step.capture_lock import between_captures
from disco_accel.step.state.code_names import is_foundation
from disco_accel.step.state.containers import OWN_PREFIX
from disco_accel.step.state.pure import is_pure
from disco_accel.step.state.python_state import PythonState, names_read
from disco_accel.step.state.torch_settings import ambient_state


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """What models read from a batch's contents to choose their ops.

    ``full_mask``: the 2-d attention mask hides nothing (also when there is none). ``packed``: ``position_ids``
    restart or jump inside a row.
    """

    full_mask: bool
    packed: bool


def batch_facts(kwargs: Mapping[str, Any]) -> BatchFacts:
    """Look at the concrete batch as mask code does."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    full = not isinstance(mask, torch.Tensor) or (mask.dim() == 2 and no_zero(mask))
    packed = False
    if isinstance(positions, torch.Tensor) and positions.dim() == 2 and positions.shape[-1] > 1:
        packed = bool((positions.diff(dim=-1) != 1).any())
    return BatchFacts(full, packed)


@dataclass(frozen=True, slots=True)
class StepKey:
    """Two steps with equal keys have the same graph."""

    arguments: tuple[Hashable, ...]
    """What the forward is called with, and what is set for the process or the calling thread."""
    state: int
    """Number of the state that the model's Python objects and the layouts of its tensors are in; equal states of one
    model have equal numbers."""


class ModelState:
    """The numbers of the states that one model has been seen in, and the state that it was last seen in."""

    def __init__(self) -> None:
        self._last: PythonState | None = None
        self._names: frozenset[str] | None = None
        self._ran = False
        self._code: dict[types.CodeType, dict[str, Any]] = {}
        self._numbers: dict[bytes, int] = {}
        self._next = itertools.count()
        self.number = -1
        self.runs_in_backward = False
        """Whether Python code runs in a backward, of an autograd.Function or of a checkpointed forward."""
        self.difference = ""
        """What made the last state another one than that before, for messages."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        # A copy of the model has objects of its own.
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def look(self, model: torch.nn.Module) -> None:
        """Bring ``number`` up to date."""
        if self._last is not None and self._last.same():
            return
        with between_captures():
            if self._last is not None:
                if self._last.same():
                    return
                self.difference = self._last.last_difference
            # First, because the step would do it after its key was made, and seem to be another one at its end.
            settle_states(model)
            self._last = PythonState(model, self._names, self._code.items())
        number = self._numbers.get(self._last.digest)
        self.number = self._numbers[self._last.digest] = next(self._next) if number is None else number

    def for_backward(self) -> PythonState | None:
        """The state that a backward must find, if it runs Python code."""
        return self._last if self.runs_in_backward else None

    def snapshot(self, model: torch.nn.Module) -> PythonState:
        """The whole state now, also what no forward was seen to read."""
        if self._last is not None and self._names is None and self._last.same():
            return self._last
        return PythonState(model, None, self._code.items())

    def ran(self, model: torch.nn.Module, executed: ExecutedCode, *, changed: bool) -> None:
        """Take note of code that a forward or backward of the model has run: what it names is what counts.

        Unless the code ``changed`` it, the state that the model is in keeps its number; earlier states are looked at
        anew when they return.
        """
        # PyTorch's tracer runs code, too, other code each time; it reads no attributes but those that all modules have.
        executed = [e for e in executed if not (is_foundation(e[0], e[1]) or is_pure(e[0]))]
        names, unknown = names_read(executed), self._ran and self._names is None
        before = self._names, len(self._code)
        self._names = None if names is None or unknown else names | (self._names or frozenset())
        self._ran = True
        self._code.update((code, space) for code, space, _ in executed)
        self.runs_in_backward = self.runs_in_backward or any(backward for *_, backward in executed)
        if before != (self._names, len(self._code)) or changed:
            self._last = PythonState(model, self._names, self._code.items())
            self.number = next(self._next) if changed else self.number
            self._numbers = {self._last.digest: self.number}


_STATE = OWN_PREFIX + "_model_state"


def model_state(model: torch.nn.Module) -> ModelState:
    """The states of ``model``, kept on it."""
    state: ModelState | None = model.__dict__.get(_STATE)
    if state is None:
        state = model.__dict__[_STATE] = ModelState()
    return state


def forget_state(model: torch.nn.Module) -> None:
    """Keep nothing on ``model`` any more."""
    model.__dict__.pop(_STATE, None)


def step_key(model: torch.nn.Module, kwargs: Mapping[str, Any]) -> StepKey:
    """The key of the step that ``model`` would run on this batch now. Cheap: called at every step.

    Raises:
        CaptureError: an argument of a kind that no key can describe, or a mode of PyTorch's that plans would escape.
    """
    state = model_state(model)
    state.look(model)
    return StepKey(_arguments(kwargs), state.number)


def _arguments(kwargs: Mapping[str, Any]) -> tuple[Hashable, ...]:
    return (
        tuple(_tensor_key(name, tensor) for name, tensor in batch_tensors(kwargs).items()),
        tuple((name, _value_key(name, value)) for name, value in kwargs.items()),
        batch_facts(kwargs),
        ambient_state(),
    )


def state_number(model: torch.nn.Module) -> int:
    """A number that changes whenever what a forward of ``model`` can read changes."""
    state = model_state(model)
    state.look(model)
    return state.number


def _tensor_key(name: str, tensor: torch.Tensor) -> tuple[Hashable, ...]:
    return name, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, tensor.requires_grad


def _value_key(name: str, value: Any) -> Hashable:
    """Python values are constants of the graph; tensors are described elsewhere."""
    if isinstance(value, torch.Tensor) or (name in PER_STEP_NUMBERS and isinstance(value, (int, float))):
        return "tensor"
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        # 1, 1.0 and True are equal but trace differently.
        return type(value).__name__, value
    if isinstance(value, Mapping):
        return tuple((str(k), _value_key(f"{name}.{k}", v)) for k, v in value.items())
    if isinstance(value, (tuple, list)):
        return type(value).__name__, tuple(_value_key(f"{name}.{i}", v) for i, v in enumerate(value))
    raise CaptureError(f"{name}: a {type(value).__name__} cannot be an argument of a planned step; leave it out")
