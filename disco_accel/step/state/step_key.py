"""The key of a step, which changes whenever its graph could."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext

from disco_accel.capture.attention import cudnn_attention_wanted
from disco_accel.capture.autocast import autocast_state
from disco_accel.capture.fake_inputs import PER_STEP_NUMBERS, batch_tensors
from disco_accel.capture.parts import run_first_forward_changes, settle_states
from disco_accel.errors import CaptureError
from disco_accel.native.backend import backend_of_kind
from disco_accel.native.change_watch import ExecutedCode, no_zero
from disco_accel.native.device_types import DEVICE_TYPES
from disco_accel.step.capture_lock import between_captures
from disco_accel.step.state.containers import OWN_PREFIX
from disco_accel.step.state.forward_code import is_foundation, is_pure
from disco_accel.step.state.python_state import PythonState, names_read


def has_full_mask(batch: Mapping[str, Any]) -> bool:
    """Whether the 2-d attention mask hides nothing, also when there is none. Models choose their ops by it."""
    mask = batch.get("attention_mask")
    return not isinstance(mask, torch.Tensor) or (mask.dim() == 2 and no_zero(mask))


def is_packed(batch: Mapping[str, Any]) -> bool:
    """Whether ``position_ids`` restart or jump inside a row. Models choose their ops by it."""
    positions = batch.get("position_ids")
    if not isinstance(positions, torch.Tensor) or positions.dim() != 2 or positions.shape[-1] <= 1:
        return False
    return bool((positions.diff(dim=-1) != 1).any())


@dataclass(frozen=True, slots=True)
class StepKey:
    """Two steps with equal keys have the same graph."""

    arguments: tuple[Hashable, ...]
    """The arguments of the forward, and the settings of the process or the calling thread."""
    state: int
    """Number of the state that the model's Python objects and the layouts of its tensors are in; equal states of one
    model have equal numbers."""


class ModelState:
    """The numbers of the states that one model has been seen in, and the state that it was last seen in. The state
    before is kept, too, where switches alone lie between the two, as ``eval()`` sets them: to look whether the model is
    in it again takes a hundredth of the time of a walk."""

    def __init__(self) -> None:
        self._last: PythonState | None = None
        self._before: PythonState | None = None
        self._after_first: PythonState | None = None
        """The state that ``look_at_forward`` has left."""
        self._names: frozenset[str] | None = None
        self._ran = False
        self._code: dict[types.CodeType, dict[str, Any]] = {}
        self._numbers: dict[bytes, int] = {}
        self._next = itertools.count()
        self.number = -1
        self.runs_in_backward = False
        """Whether Python code runs in a backward, of an autograd.Function or of a checkpointed forward."""
        self.difference = ""
        """Names the change that made the last state another one than that before."""

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
            last = self._last
            if self._before is not None and self._before.same():
                self._last, self._before = self._before, last
            else:
                self._last = PythonState(model, self._names, self._code.items())
                self._before = last if last is not None and last.holds_all_but_plain_values() else None
        number = self._numbers.get(self._last.digest)
        self.number = self._numbers[self._last.digest] = next(self._next) if number is None else number

    def look_at_forward(self, model: torch.nn.Module, device: torch.device) -> None:
        """As ``look``, after ``run_first_forward_changes`` without gradients, once for each state of the model. All
        that it goes by, the layers' forwards read too. Its walk takes as long as a token of a small model."""
        self.look(model)
        if self._last is not self._after_first:
            run_first_forward_changes(model, device, gradients=False)
            self.look(model)
            self._after_first = self._last

    def for_backward(self) -> PythonState | None:
        """The state that a backward must find, if it runs Python code."""
        return self._last if self.runs_in_backward else None

    @property
    def last_seen(self) -> PythonState | None:
        """The state that ``look`` has seen last."""
        return self._last

    def snapshot(self, model: torch.nn.Module) -> PythonState:
        """The whole state now, also those parts that no forward was seen to read."""
        if self._last is not None and self._names is None and self._last.same():
            return self._last
        return PythonState(model, None, self._code.items())

    def ran(self, model: torch.nn.Module, executed: ExecutedCode, *, changed: bool) -> None:
        """Take note of code that a forward or backward of the model has run: the names in it count.

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
            self._last, self._before = PythonState(model, self._names, self._code.items()), None
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


def step_key(model: torch.nn.Module, kwargs: Mapping[str, Any], *, forward_on: torch.device | None = None) -> StepKey:
    """The key of the step that ``model`` would run on this batch now. Cheap: called at every step. ``forward_on``: the
    device of a forward without gradients. Layers are left as their first such forward leaves them.

    Raises:
        CaptureError: an argument of a kind that no key can describe, or a mode of PyTorch's that plans would escape.
    """
    state = model_state(model)
    if forward_on is None:
        state.look(model)
    else:
        state.look_at_forward(model, forward_on)
    return StepKey(_arguments(kwargs), state.number)


def _arguments(kwargs: Mapping[str, Any]) -> tuple[Hashable, ...]:
    return (
        tuple(_tensor_key(name, tensor) for name, tensor in batch_tensors(kwargs).items()),
        tuple((name, _value_key(name, value)) for name, value in kwargs.items()),
        has_full_mask(kwargs),
        is_packed(kwargs),
        ambient_state(),
    )


def state_number(model: torch.nn.Module) -> int:
    """A number that changes with all state that a forward of ``model`` can read."""
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


_READERS = (
    "_get_flash_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_math_sdp_enabled",
    "_get_overrideable_sdp_enabled",
    "_get_math_sdp_allow_fp16_bf16_reduction",
    "_get_sdp_priority_order",
    "_get_deterministic_algorithms",
    "_get_deterministic_algorithms_warn_only",
    "_get_deterministic_fill_uninitialized_memory",
    *(name for kind in DEVICE_TYPES for name in backend_of_kind(kind).switches),
)
"""Of ``torch._C``; versions of PyTorch that lack one do not have the setting."""
_OF_BACKENDS = (backend_of_kind(kind).precisions for kind in DEVICE_TYPES)
_PRECISIONS = (("generic", "all"), *((b, op) for b in _OF_BACKENDS for op in ("matmul", "conv", "rnn")))

_readers: tuple[Callable[[], Any], ...] = tuple(
    reader for name in _READERS if callable(reader := getattr(torch._C, name, None))
)
_precision: Callable[[str, str], Any] | None = getattr(torch._C, "_get_fp32_precision_getter", None)


def ambient_state() -> tuple[Hashable, ...]:
    """PyTorch's settings of the process and of this thread that decide which kernels a step runs.

    Raises:
        CaptureError: a mode is active that sees every op, or anomaly detection; the ops of a plan would escape it.
    """
    _refuse_modes()
    settings = [reader() for reader in _readers]
    settings.append(cudnn_attention_wanted())
    precisions = () if _precision is None else tuple([_precision(*which) for which in _PRECISIONS])
    return (
        autocast_state(),
        torch.get_float32_matmul_precision(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.backends.mha._is_fastpath_enabled if hasattr(torch.backends, "mha") else None,
        _default_device(),
        tuple([tuple(s) if type(s) is list else s for s in settings]),
        precisions,
    )


def _default_device() -> str:
    device = getattr(torch.utils._device, "CURRENT_DEVICE", None)
    return "" if device is None else str(device)


def _refuse_modes() -> None:
    for index in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(index)
        if not isinstance(mode, DeviceContext):
            raise CaptureError(_mode_message(mode))
    if torch._C._len_torch_dispatch_stack():
        raise CaptureError(_mode_message(_python_dispatch._get_current_dispatch_mode()))
    if torch.is_anomaly_enabled():
        raise CaptureError(
            "detect_anomaly: a planned step runs its kernels without autograd, which could name no op; "
            "look for the anomaly with restore(model), or leave detect_anomaly out"
        )


def _mode_message(mode: object) -> str:
    return (
        f"{type(mode).__name__}: this mode sees every op that runs inside it, and a planned step's ops run elsewhere; "
        "leave the mode out around planned steps, or use it with restore(model)"
    )
