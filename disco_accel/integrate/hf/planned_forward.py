"""Any forward of a prepared model without gradients, from a plan: evaluation, references, rewards, decoding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, StaticCache

from disco_accel.capture.attention import masks_in_rows_of
from disco_accel.capture.captured_step import CapturedStep
from disco_accel.capture.fake_inputs import batch_tensors
from disco_accel.capture.parts import named_parts
from disco_accel.capture.storages import storage_key
from disco_accel.errors import BudgetTooSmall, CaptureError
from disco_accel.integrate.hf.forward_results import cut_result, result_of, take_apart, with_padding
from disco_accel.integrate.hf.growing_cache import growing_arguments, growing_batch
from disco_accel.integrate.hf.kv_cache import (
    TracedCache,
    cache_arguments,
    check_cache,
    fill,
    room_to_fill,
    tokens_of,
)
from disco_accel.integrate.hf.static_cache import (
    ARGUMENT,
    adopt_empty,
    check_static,
    fill_static,
    is_static,
    layers_to_move,
    move_home,
    names_at_home,
    static_arguments,
    static_cache_of,
)
from disco_accel.integrate.hf.tracing import hf_contexts
from disco_accel.step.compile.budget_parts import leaving_bytes
from disco_accel.step.compile.fitted_batch import FittedBatch
from disco_accel.step.run.forwards import ForwardRequest, run_forward
from disco_accel.step.state.step_key import state_number

if TYPE_CHECKING:
    from disco_accel.step.run.session import Session

_CACHE = "past_key_values"
_OF_CACHE = "cache "
"""The names of a cache's new tensors begin with it: no path into a result does."""
_PARTS = 8
"""Where a plan for all lengths up to a power of two does not fit, it is for one of so many parts of them."""
_PLANNER = "timed"
"""The one that plans loads of keys and values."""
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _CacheInPlan:
    """A key/value cache that a forward is given, as its plan has it.

    ``arguments``: its contents. ``traced``: takes them out of all arguments of a trace and makes a cache of them, with
    new tensors in ``added``. ``fill``: gives these, and the ``counts`` of the traced one, to the user's cache.
    ``beside``, ``releases``, ``at_home``: as of ``ForwardRequest``. ``grows``: it is one of
    those that share a plan, as ``growing_batch`` says.
    """

    arguments: dict[str, Any]
    traced: Callable[[dict[str, Any]], Any]
    fill: Callable[[Tensors, Any], None]
    beside: Callable[[CapturedStep], int] = lambda _: 0
    releases: bool = False
    at_home: frozenset[str] = frozenset()
    grows: bool = False


def planned_forward(
    state: Session, model: torch.nn.Module, batch: Mapping[str, Any], forward: Callable[..., Any] | None = None
) -> Any:
    """The result of the model's own forward on ``batch``, arguments by name, from a plan; a cache among them gets the
    new keys and values. ``forward``: in place of the model's own, one of a module inside it.

    Raises:
        CaptureError: an argument, an op or a part of the result cannot be planned.
        BudgetTooSmall: with ``needed`` and ``given`` as whole budgets.
    """
    if not state.memory.in_own_process:
        raise CaptureError(
            "this process was forked from the one that the model's engine runs in; start workers with 'spawn'"
        )
    if torch.is_grad_enabled() and _wants_gradients(model, batch):
        raise CaptureError("requires_grad: something was unfrozen; call prepare(model, config) to train the model")
    cache = batch.get(_CACHE)
    forward = forward or state.calls.forward
    if cache is None:
        return _fitted(state, model, batch, forward)
    tensors, (structure, counts), fill_cache = _with_cache_that_fits(state, model, batch, forward)
    own = {name.removeprefix(_OF_CACHE): tensors.pop(name) for name in [*tensors] if name.startswith(_OF_CACHE)}
    fill_cache(own, counts)
    arguments = batch_tensors(batch)
    return result_of(structure, tensors, lambda name: cache if name == _CACHE else arguments[name])


def _wants_gradients(model: torch.nn.Module, batch: Mapping[str, Any]) -> bool:
    return any(t.requires_grad for t in (*model.parameters(), *batch_tensors(batch).values()))


def _fitted(state: Session, model: torch.nn.Module, batch: Mapping[str, Any], forward: Callable[..., Any]) -> Any:
    """The result of a forward that is given no cache; it may be of the padded batch, cut."""
    frontend = state.setup.frontend
    plain = tuple((name, value) for name, value in batch.items() if not isinstance(value, torch.Tensor))
    with state.placement.hidden():
        kind = repr((state_number(model), plain))
        fitted = frontend.fit_forward(model, batch, state.calls.padded_fields.get(kind, ()))
    if fitted.length is not None:
        try:
            return _run(state, model, fitted, forward, lambda field: state.calls.padded_fields.update({kind: (field,)}))
        except BudgetTooSmall as error:
            # Bits must not hang on what other jobs have at the moment.
            if state.budgets.may_wait(error):
                raise
            fitted = frontend.keep_length(fitted, batch, None)
        except CaptureError as error:
            fitted = frontend.keep_length(fitted, batch, str(error))
    return _run(state, model, fitted, forward)


def _run(
    state: Session,
    model: torch.nn.Module,
    fitted: FittedBatch,
    forward: Callable[..., Any],
    padded: Callable[[str], None] | None = None,
) -> Any:
    """The result on ``fitted``. ``padded``: there is padding; told of a field that it cannot be taken out of."""
    request = ForwardRequest(
        kind="padded forward" if padded else "forward",
        batch=fitted.batch,
        trace=_tracer(model, forward, lambda _: None, padded),
        contexts=lambda: hf_contexts(model, fitted.batch),
        beside=lambda captured: sum(leaving_bytes(captured).values()) if padded else 0,
    )
    tensors, (structure, _) = run_forward(state, model, request)
    if fitted.length is not None:
        structure, tensors = cut_result(structure, tensors, fitted.length)
    arguments = batch_tensors(fitted.batch)
    return result_of(structure, tensors, lambda name: arguments[name])


def _with_cache_that_fits(
    state: Session, model: torch.nn.Module, batch: Mapping[str, Any], forward: Callable[..., Any]
) -> tuple[Tensors, Any, Callable[[Tensors, Any], None]]:
    """As ``_with_cache``. If it does not fit, keys and values of a static cache without tokens go to host memory, and a
    plan for a cache that grows has memory for fewer tokens more."""
    try:
        return _with_cache(state, model, batch, forward)
    except BudgetTooSmall as error:
        cache, last = batch[_CACHE], error
        if _grows(cache, tokens_of(batch)):
            return _with_cache(state, model, batch, forward, _PARTS)
        if not is_static(cache) or state.setup.config.planner != _PLANNER:
            raise
        moves = layers_to_move(cache, _layer_bytes(state, cache, batch), error.needed - error.given)
    for layers in moves:
        move_home(cache, layers)
        try:
            return _with_cache(state, model, batch, forward)
        except BudgetTooSmall as error:
            last = error
    raise last


def _layer_bytes(state: Session, cache: StaticCache, batch: Mapping[str, Any]) -> dict[int, int]:
    """Bytes of keys and values of each layer that a plan of such a batch has made."""
    inputs = (batch.get(name) for name in ("input_ids", "inputs_embeds"))
    rows = tuple(tensor.shape[0] for tensor in inputs if tensor is not None)
    return state.calls.layer_bytes.setdefault((rows, tuple(layer.get_max_length() for layer in cache.layers)), {})


def _grows(cache: Any, tokens: int) -> bool:
    """Whether a forward adds one token to others."""
    return type(cache) is DynamicCache and tokens == 1 and cache.get_seq_length() > 0


def _with_cache(
    state: Session, model: torch.nn.Module, batch: Mapping[str, Any], forward: Callable[..., Any], parts: int = 1
) -> tuple[Tensors, Any, Callable[[Tensors, Any], None]]:
    """The old tensors of a cache are the user's alone once this has returned."""
    cache = _cache_in_plan(state, batch)
    given = {name: value for name, value in batch.items() if name != _CACHE} | cache.arguments
    growing = growing_batch(given, parts) if cache.grows else None
    rows = [] if growing is None else [functools.partial(masks_in_rows_of, max(growing.captured))]
    request = ForwardRequest(
        kind="growing forward" if growing else "forward",
        batch=given,
        trace=_tracer(model, forward, cache.traced),
        contexts=lambda: [*hf_contexts(model, given), *rows],
        beside=cache.beside,
        releases=cache.releases,
        changed=lambda name: name.startswith(ARGUMENT),
        at_home=cache.at_home,
        growing=growing,
    )
    return *run_forward(state, model, request), cache.fill


def _cache_in_plan(state: Session, batch: Mapping[str, Any]) -> _CacheInPlan:
    cache, tokens = batch[_CACHE], tokens_of(batch)
    if is_static(cache):
        device = state.memory.device
        if cache.offloading:
            if state.setup.config.planner != _PLANNER:
                raise CaptureError(f"{_CACHE}: one that offloads itself needs planner: {_PLANNER}")
            move_home(cache)
        adopt_empty(cache, device)
        check_static(cache, device)
        if state.setup.settings.devices > 1:
            raise CaptureError(f"{_CACHE}: a static cache cannot be filled by several devices; use one")
        sizes = _layer_bytes(state, cache, batch)
        return _CacheInPlan(
            static_arguments(cache, batch, tokens, device),
            lambda arguments: static_cache_of(arguments, sizes),
            lambda made, counts: fill_static(cache, made, counts),
            at_home=frozenset(name if name.startswith(ARGUMENT) else _OF_CACHE + name for name in names_at_home(cache)),
        )
    check_cache(cache)
    grows = _grows(cache, tokens)
    past = growing_arguments(cache, batch) if grows else cache_arguments(cache)
    return _CacheInPlan(
        past,
        TracedCache.of,
        lambda made, _: fill(cache, made, tokens),
        lambda captured: room_to_fill(past["past"], leaving_bytes(captured)),
        any(past["past"]),
        grows=grows,
    )


def traced_token(model: torch.nn.Module, forward: Callable[..., Any]) -> Callable[..., Tensors]:
    """``forward`` in terms of tensors: from arguments with those of ``static_arguments`` to the result's tensors."""
    trace = _tracer(model, forward, lambda arguments: static_cache_of(arguments, {}))
    return lambda **arguments: trace(**arguments)[0]


def _tracer(
    model: torch.nn.Module,
    forward: Callable[..., Any],
    traced_cache: Callable[[dict[str, Any]], Any],
    padded: Callable[[str], None] | None = None,
) -> Callable[..., tuple[Tensors, Any]]:
    def trace(**arguments: Any) -> tuple[Tensors, Any]:
        tensors = batch_tensors(arguments)
        cache = traced_cache(arguments)
        replaced: dict[int, str] = {}
        if cache is not None:
            arguments[_CACHE] = cache
            replaced[id(cache)] = _CACHE
        result = forward(**arguments)
        held = {storage_key(part.tensor) for part in named_parts(model)}
        found, structure = take_apart(result, tensors, replaced, held)
        if padded is not None:
            _refuse_padding(with_padding(structure, found, tokens_of(arguments)), padded)
        copies = {name: tensor.clone() for name, tensor in found.items()}
        if cache is not None:
            copies |= {_OF_CACHE + name: tensor for name, tensor in cache.added.items()}
        if not copies:
            raise CaptureError("the result: has no tensor of its own, so that there is nothing to plan")
        return copies, (structure, getattr(cache, "counts", ()))

    return trace


def _refuse_padding(field: str | None, told: Callable[[str], None]) -> None:
    if field is not None:
        told(field)
        advice = "; set use_cache=False where nothing reads it" if field == _CACHE else ""
        raise CaptureError(f"{field}: padding could not be taken out of it{advice}")
