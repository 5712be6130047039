"""What a captured step depends on: a key that changes whenever its graph could."""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import weakref
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from disco_accel.capture.autocast import AutocastState, autocast_state
from disco_accel.capture.twins import PER_STEP_NUMBERS, batch_tensors
from disco_accel.errors import CaptureError


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
    full = not isinstance(mask, torch.Tensor) or (mask.dim() == 2 and bool((mask != 0).all()))
    packed = False
    if isinstance(positions, torch.Tensor) and positions.dim() == 2 and positions.shape[-1] > 1:
        packed = bool((positions.diff(dim=-1) != 1).any())
    return BatchFacts(full, packed)


@dataclass(frozen=True, slots=True)
class StepKey:
    """Two steps with equal keys have the same graph. ``structure`` counts changes of the module tree."""

    structure: int
    tensors: tuple[tuple[Hashable, ...], ...]
    values: tuple[tuple[str, Hashable], ...]
    facts: BatchFacts
    autocast: AutocastState
    matmul_precision: str
    grad_enabled: bool
    training: bytes
    state: int
    """Number of the state that parameters and modules are in; equal states of one model have equal numbers."""


@dataclass
class _Watched:
    """Flat lists over one model, so that a key needs no walk of the module tree."""

    structure: int = 0
    tables: list[dict[str, Any]] = field(default_factory=list)
    empty: list[dict[str, Any]] = field(default_factory=list)
    children: list[Any] = field(default_factory=list)
    modules: list[Any] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)
    tuners: list[Any] = field(default_factory=list)
    dropouts: list[Any] = field(default_factory=list)
    checkpointing: list[Any] = field(default_factory=list)
    configs: list[Any] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)
    states: dict[tuple[Hashable, ...], int] = field(default_factory=dict)
    state: int = -1

    def number_of_state(self) -> int:
        """See ``StepKey.state``. To compare with copies of the last look is faster than to make a key and hash it."""
        now = [
            list(map(_LAYOUT, self.parameters)),
            [getattr(m, name) for m, name in self.dropouts],
            [(m.gradient_checkpointing, _function_key(m)) for m in self.checkpointing],
            [_adapter_state(t) for t in self.tuners],
            list(map(vars, self.configs)),
        ]
        if now != self.seen:
            # Adapters and configs hand out what they may change in place.
            *plain, adapters, configs = now
            self.seen = [*plain, [tuple(map(copy.copy, parts)) for parts in adapters], [dict(c) for c in configs]]
            self.state = self.states.setdefault((*now[0], *_module_key(self)), len(self.states))
        return self.state

    def stale(self) -> bool:
        """Whether a module, parameter or buffer was added, removed or replaced."""
        if any(self.empty):
            return True
        now = list(_entries(self.tables))
        return len(now) != len(self.children) or not all(map(operator.is_, now, self.children))

    def refresh(self, model: torch.nn.Module) -> None:
        """Walk the tree anew."""
        self.structure += 1
        # A table of models that held them would keep each alive for ever: the root by proxy, its parts for real.
        self.modules = [weakref.proxy(model), *list(model.modules())[1:]]
        tables = [t for m in self.modules for t in (m._modules, m._parameters, m._buffers)]
        self.tables = [t for t in tables if t]
        self.empty = [t for t in tables if not t]
        self.children = list(_entries(self.tables))
        self.parameters = list(model.parameters())
        self.tuners = [m for m in self.modules if hasattr(m, "merged_adapters") and hasattr(m, "active_adapters")]
        # What torch's and transformers' modules keep their dropout probabilities in.
        self.dropouts = [
            (m, n) for m in self.modules for n in _PROBABILITIES if type(getattr(m, n, None)) in (int, float)
        ]
        self.checkpointing = [m for m in self.modules if hasattr(m, "gradient_checkpointing")]
        configs = {id(c): c for m in self.modules if (c := getattr(m, "config", None)) is not None}
        self.configs = list(configs.values())


def _entries(tables: list[dict[str, Any]]) -> Iterable[Any]:
    return itertools.chain.from_iterable(map(dict.values, tables))


_watched: weakref.WeakKeyDictionary[torch.nn.Module, _Watched] = weakref.WeakKeyDictionary()
_TRAINING = operator.attrgetter("training")
_LAYOUT = operator.attrgetter("requires_grad", "dtype", "shape")
_PROBABILITIES = ("p", "dropout", "attention_dropout", "attn_dropout", "resid_dropout", "activation_dropout")
_CONFIG_FIELDS = ("_attn_implementation", "use_cache", "is_causal", "attention_dropout", "_experts_implementation")


def step_key(model: torch.nn.Module, kwargs: Mapping[str, Any]) -> StepKey:
    """The key of the step that ``model`` would run on this batch now. Cheap: called at every step.

    Raises:
        CaptureError: an argument of a kind that no key can describe.
    """
    watched = _up_to_date(model)
    return StepKey(
        structure=watched.structure,
        tensors=tuple(_tensor_key(name, tensor) for name, tensor in batch_tensors(kwargs).items()),
        values=tuple((name, _value_key(name, value)) for name, value in kwargs.items()),
        facts=batch_facts(kwargs),
        autocast=autocast_state(),
        matmul_precision=torch.get_float32_matmul_precision(),
        grad_enabled=torch.is_grad_enabled(),
        training=bytes(map(_TRAINING, watched.modules)),
        state=watched.number_of_state(),
    )


def structure_of(model: torch.nn.Module) -> int:
    """A number that changes whenever a module, parameter or buffer of ``model`` is added, removed or replaced."""
    return _up_to_date(model).structure


def _up_to_date(model: torch.nn.Module) -> _Watched:
    watched = _watched.setdefault(model, _Watched())
    if watched.structure == 0 or watched.stale():
        watched.refresh(model)
    return watched


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


def _adapter_state(tuner: Any) -> tuple[Any, ...]:
    return (
        getattr(tuner, "disable_adapters", False),
        tuner.active_adapters,
        tuner.merged_adapters,
        getattr(tuner, "scaling", None),
    )


def _module_key(watched: _Watched) -> tuple[Hashable, ...]:
    tuners = tuple(
        (bool(disabled), tuple(active), tuple(merged), tuple((scaling or {}).items()))
        for disabled, active, merged, scaling in map(_adapter_state, watched.tuners)
    )
    segments = tuple((m.gradient_checkpointing, _function_key(m)) for m in watched.checkpointing)
    configs = tuple(str(getattr(c, name, None)) for c in watched.configs for name in _CONFIG_FIELDS)
    return tuners, tuple(getattr(m, name) for m, name in watched.dropouts), segments, configs


def _function_key(module: Any) -> Hashable:
    """The checkpoint function itself, so that the key keeps it alive and its identity unique."""
    function = getattr(module, "_gradient_checkpointing_func", None)
    if isinstance(function, functools.partial):
        return function.func, tuple(sorted((k, str(v)) for k, v in function.keywords.items()))
    return function
