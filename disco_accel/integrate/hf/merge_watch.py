"""PEFT's merges of adapters into the weights of prepared models, which lie in host memory.

Base weights that ``unmerge_adapter`` leaves with other bits than before ``merge_adapter`` are told once. PEFT adds an
adapter to a weight in the weight's dtype, and subtracts it from the rounded sum. Weights are read at a merge and an
unmerge alone, until the line is said.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from disco_accel.capture.parts import frozen_parts
from disco_accel.integrate.hf.host_merges import _OnTheHost
from disco_accel.native.extension import load_extension
from disco_accel.native.host_memory import bytes_of, footprint
from disco_accel.step.run.session import find_state

_PEFT = "peft.tuners.tuners_utils"
_BASE = ".base_layer."
"""In the names of weights that adapters are merged into."""
_METHODS = ("merge_adapter", "unmerge_adapter", "merge_and_unload")

_lock = threading.Lock()
_patches: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
"""PEFT's methods, and ours in their places, while a prepared model is watched."""


class _Merges:
    """What is known of one model's base. ``before``: name → key of each weight's bytes, while adapters are merged."""

    def __init__(self) -> None:
        self.before: dict[str, list[int]] = {}
        self.told = False

    def begin(self, model: torch.nn.Module) -> None:
        """Adapters are about to be merged."""
        if not self.told and not _is_merged(model):
            # A forward with the adapter disabled may have unmerged it.
            self.end(model)
            self.before = _keys(model)

    def end(self, model: torch.nn.Module) -> None:
        """Adapters were unmerged, all of them or some."""
        state = find_state(model)
        if not self.before or _is_merged(model) or state is None:
            return
        before, self.before = self.before, {}
        after = _keys(model)
        changed = [name for name, key in before.items() if after.get(name, key) != key]
        if changed and not self.told:
            self.told = True
            state.reports.say_once(
                f"{len(changed)} of {len(before)} base tensors have other bits than before merge_adapter(), the first "
                f"is {changed[0]}: PEFT's unmerge_adapter() subtracts what was rounded when it was added. Plans use "
                "them as they are. Load the base again or put a copy of it back; generate() and disable_adapter() "
                "need no merge"
            )


_watched: weakref.WeakKeyDictionary[torch.nn.Module, _Merges] = weakref.WeakKeyDictionary()


def watch_merges(model: torch.nn.Module) -> Callable[[], None]:
    """Tell of such weights of ``model`` until the result is called. Does nothing where PEFT is not in use."""
    tuner = getattr(sys.modules.get(_PEFT), "BaseTuner", None)
    if tuner is None:
        return lambda: None
    with _lock:
        _watched[model] = _Merges()
        if not _patches:
            for name, make in zip(_METHODS, (_merging, _unmerging, _unloading), strict=True):
                original = getattr(tuner, name)
                _patches[name] = original, make(original)
                setattr(tuner, name, _patches[name][1])
    return functools.partial(_unwatch, model, tuner)


def _unwatch(model: torch.nn.Module, tuner: Any) -> None:
    with _lock:
        _watched.pop(model, None)
        # A method that somebody else has put in the place of ours may call it.
        if not _watched and all(vars(tuner).get(name) is ours for name, (_, ours) in _patches.items()):
            for name, (original, _) in _patches.items():
                setattr(tuner, name, original)
            _patches.clear()


def _merging(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def merge_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
        watched = list(_watched_of(self))
        for model, merges in watched:
            merges.begin(model)
        return _beside_weights(watched, original, self, *args, **kwargs)

    return merge_adapter


def _unmerging(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def unmerge_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
        watched = list(_watched_of(self))
        result = _beside_weights(watched, original, self, *args, **kwargs)
        for model, merges in watched:
            merges.end(model)
        return result

    return unmerge_adapter


def _unloading(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def merge_and_unload(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _beside_weights(list(_watched_of(self)), original, self, *args, **kwargs)

    return merge_and_unload


def _beside_weights(watched: list[Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of ``original``, which merges adapters of models that are ``watched``."""
    with _OnTheHost() if watched else nullcontext():  # type: ignore[no-untyped-call]
        return original(*args, **kwargs)


def _watched_of(tuner: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, _Merges]]:
    """Prepared models with the adapters of ``tuner``, above it or below."""
    below = set(tuner.modules())
    for model, merges in list(_watched.items()):
        if model in below or any(module is tuner for module in model.modules()):
            yield model, merges


def _is_merged(model: torch.nn.Module) -> bool:
    return any(getattr(module, "merged_adapters", None) for module in model.modules())


def _keys(model: torch.nn.Module) -> dict[str, list[int]]:
    """Of the weights on the host that adapters can be merged into. Reads each once, as fast as memory is."""
    load_extension()
    parts = {name: part for name, part in frozen_parts(model).items() if _BASE in name}
    plain = {name: part for name, part in parts.items() if part.is_cpu and footprint(part) <= part.nbytes}
    return {name: torch.ops.disco_accel.content_key([bytes_of(part)]) for name, part in plain.items()}
