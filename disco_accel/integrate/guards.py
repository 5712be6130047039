"""What a captured step depends on: a key that changes whenever its graph could."""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from disco_accel.capture.autocast import autocast_state
from disco_accel.capture.twins import PER_STEP_NUMBERS, batch_tensors
from disco_accel.errors import CaptureError
from disco_accel.execute.unchanged import WatchedAttributes, WatchedEntries, WatchedLayouts, no_zero


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
    """Two steps with equal keys have the same graph. ``structure`` counts changes of the module tree."""

    structure: int
    given: tuple[Hashable, ...]
    """The arguments, and what is set for the calling thread."""
    training: bytes
    state: int
    """Number of the state that parameters and modules are in; equal states of one model have equal numbers."""


@dataclass
class _Watched:
    """Flat lists over one model, so that a key needs no walk of the module tree."""

    structure: int = 0
    tables: list[dict[str, Any]] = field(default_factory=list)
    entries: list[Any] = field(default_factory=list)
    modules: list[Any] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)
    tuners: list[Any] = field(default_factory=list)
    dropouts: list[Any] = field(default_factory=list)
    checkpointing: list[Any] = field(default_factory=list)
    configs: list[Any] = field(default_factory=list)
    last: _Look | None = None
    states: dict[tuple[Hashable, ...], int] = field(default_factory=dict)
    training: bytes = b""
    state: int = -1

    def look(self, model: torch.nn.Module) -> None:
        """Bring ``structure``, ``training`` and ``state`` up to date."""
        if self.last is not None and self.last.same(self):
            return
        if self.structure == 0 or self.stale():
            self.refresh(model)
        self.training = bytes(map(_TRAINING, self.modules))
        layouts = tuple(map(_LAYOUT, self.parameters))
        self.state = self.states.setdefault((layouts, *_module_key(self)), len(self.states))
        self.last = _Look(self)

    def stale(self) -> bool:
        """Whether a module, parameter or buffer was added, removed or replaced."""
        tables, entries = _tables(self.modules), list(_entries(self.tables))
        return len(entries) != len(self.entries) or not all(
            map(operator.is_, (*tables, *entries), (*self.tables, *self.entries))
        )

    def refresh(self, model: torch.nn.Module) -> None:
        """Walk the tree anew."""
        self.structure += 1
        # A table of models that held them would keep each alive for ever: the root by proxy, its parts for real.
        self.modules = [weakref.proxy(model), *list(model.modules())[1:]]
        self.tables = _tables(self.modules)
        self.entries = list(_entries(self.tables))
        self.parameters = list(model.parameters())
        self.tuners = [m for m in self.modules if hasattr(m, "merged_adapters") and hasattr(m, "active_adapters")]
        # What torch's and transformers' modules keep their dropout probabilities in.
        self.dropouts = [
            (m, n) for m in self.modules for n in _PROBABILITIES if type(getattr(m, n, None)) in (int, float)
        ]
        self.checkpointing = [m for m in self.modules if hasattr(m, "gradient_checkpointing")]
        configs = {id(c): c for m in self.modules if (c := getattr(m, "config", None)) is not None}
        self.configs = list(configs.values())


class _Look:
    """All that the key of a model rests on, as it was at the last look: to compare it is faster than to make a key.

    Most of it by identity, in native code. The rest by value: what modules keep elsewhere than others do, and what is
    changed in place.
    """

    def __init__(self, watched: _Watched) -> None:
        # The root is a proxy, which would be watched in the place of the module.
        root = watched.modules[0]
        self._training, plain = _parted(watched.modules, lambda m: m is not root and "training" in vars(m))
        self._tuners, tuners = _parted(watched.tuners, _is_peft_layer)
        self._checkpointing, segments = _parted(watched.checkpointing, lambda m: m is not root and _has_switch(m))
        self._dropouts, dropouts = _parted(watched.dropouts, lambda d: d[0] is not root and d[1] in vars(d[0]))
        self._parameters, parameters = _parted(watched.parameters, _is_plain)
        scalings = [s for t in tuners if isinstance(s := vars(t).get("scaling"), dict)]
        functions = [vars(m).get("_gradient_checkpointing_func") for m in segments]
        keywords = [f.keywords for f in functions if isinstance(f, functools.partial)]
        self._lists = [v for t in tuners for v in (t.merged_adapters, t.active_adapter) if isinstance(v, list)]
        self._first = (
            WatchedAttributes(plain, ("training", *_TABLES)),
            WatchedAttributes(tuners, _ADAPTER_ATTRIBUTES),
            WatchedAttributes(segments, _SWITCHES),
            WatchedLayouts(parameters),
        )
        self._rest = (
            WatchedAttributes([m for m, _ in dropouts], _PROBABILITIES),
            WatchedEntries([*watched.tables, *scalings, *keywords]),
        )
        # Copies of what is handed out and may be changed in place.
        modes, lists, adapters, configs, *others = self._by_value(watched)
        adapters = [tuple(map(copy.copy, parts)) for parts in adapters]
        self._values = [modes, list(map(copy.copy, lists)), adapters, list(map(copy.copy, configs)), *others]

    def same(self, watched: _Watched) -> bool:
        """Whether nothing has changed since."""
        rest = all(look.same() for look in self._rest)
        return rest and self.same_at_first_sight() and self._by_value(watched) == self._values

    def same_at_first_sight(self) -> bool:
        """Whether modes, adapters, checkpointing and layouts of weights are as they were."""
        return all(look.same() for look in self._first) and self._modes() == self._values[0]

    def _modes(self) -> list[Any]:
        return [(m.training, *(id(getattr(m, name)) for name in _TABLES)) for m in self._training]

    def _by_value(self, watched: _Watched) -> list[Any]:
        return [
            self._modes(),
            self._lists,
            list(map(_adapter_state, self._tuners)),
            list(map(vars, watched.configs)),
            [getattr(m, name) for m, name in self._dropouts],
            [(m.gradient_checkpointing, _function_key(m)) for m in self._checkpointing],
            list(map(_LAYOUT, self._parameters)),
        ]


def _parted(items: Iterable[Any], chosen: Callable[[Any], bool]) -> tuple[list[Any], list[Any]]:
    """Those that are not ``chosen``, and those that are."""
    parts: tuple[list[Any], list[Any]] = ([], [])
    for item in items:
        parts[chosen(item)].append(item)
    return parts


def _is_plain(parameter: torch.Tensor) -> bool:
    return type(parameter) is torch.nn.Parameter and not parameter.is_nested


def _has_switch(module: Any) -> bool:
    return all(name in vars(module) for name in _SWITCHES if hasattr(module, name))


def _is_peft_layer(tuner: Any) -> bool:
    """Whether the state of an adapter is in attributes of ``tuner`` itself, as PEFT's own layers have it."""
    # By name: PEFT need not be there, and must not be imported, to be recognised.
    for name in ("disable_adapters", "active_adapters", "active_adapter"):
        owner: Any = next((c for c in type(tuner).__mro__ if name in vars(c)), None)
        if owner is None or (owner.__module__, owner.__name__) != ("peft.tuners.tuners_utils", "BaseTunerLayer"):
            return False
    return "merged_adapters" in vars(tuner) and isinstance(vars(tuner).get("scaling", {}), dict)


def _tables(modules: list[Any]) -> list[dict[str, Any]]:
    return [t for m in modules for t in (m._modules, m._parameters, m._buffers)]


def _entries(tables: list[dict[str, Any]]) -> Iterable[Any]:
    """Keys and values in turn."""
    return itertools.chain.from_iterable(itertools.chain.from_iterable(map(dict.items, tables)))


_watched: weakref.WeakKeyDictionary[torch.nn.Module, _Watched] = weakref.WeakKeyDictionary()
_TRAINING = operator.attrgetter("training")
_LAYOUT = operator.attrgetter("requires_grad", "dtype", "shape")
_TABLES = ("_modules", "_parameters", "_buffers")
_ADAPTER_ATTRIBUTES = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
_SWITCHES = ("gradient_checkpointing", "_gradient_checkpointing_func")
_PROBABILITIES = ("p", "dropout", "attention_dropout", "attn_dropout", "resid_dropout", "activation_dropout")
_CONFIG_FIELDS = ("_attn_implementation", "use_cache", "is_causal", "attention_dropout", "_experts_implementation")


def step_key(model: torch.nn.Module, kwargs: Mapping[str, Any]) -> StepKey:
    """The key of the step that ``model`` would run on this batch now. Cheap: called at every step.

    Raises:
        CaptureError: an argument of a kind that no key can describe.
    """
    watched = _up_to_date(model)
    return StepKey(watched.structure, _given(kwargs), watched.training, watched.state)


def seems(model: torch.nn.Module, kwargs: Mapping[str, Any], key: StepKey) -> bool:
    """Whether ``key`` is this step's as far as a first sight tells, which misses what was replaced in the module tree
    and what configs say. Never enough to run a plan.

    Raises:
        CaptureError: see ``step_key``.
    """
    watched = _watched.get(model)
    return (
        watched is not None
        and watched.last is not None
        and (watched.structure, watched.training, watched.state) == (key.structure, key.training, key.state)
        and watched.last.same_at_first_sight()
        and _given(kwargs) == key.given
    )


def _given(kwargs: Mapping[str, Any]) -> tuple[Hashable, ...]:
    return (
        tuple(_tensor_key(name, tensor) for name, tensor in batch_tensors(kwargs).items()),
        tuple((name, _value_key(name, value)) for name, value in kwargs.items()),
        batch_facts(kwargs),
        autocast_state(),
        torch.get_float32_matmul_precision(),
        torch.is_grad_enabled(),
    )


def structure_of(model: torch.nn.Module) -> int:
    """A number that changes whenever a module, parameter or buffer of ``model`` is added, removed or replaced."""
    return _up_to_date(model).structure


def _up_to_date(model: torch.nn.Module) -> _Watched:
    watched = _watched.setdefault(model, _Watched())
    watched.look(model)
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
