"""``master_weights: fp32``: an optimizer of PyTorch's updates fp32 masters of a model's bf16 and fp16 weights.

``step()`` itself runs, without the gradients of these weights: a hook that runs as the last one before it has updated
masters, moments and weights with them. ``step()`` updates other parameters as ever.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from disco_accel.errors import ConfigError
from disco_accel.step.optimizer_home import ROUNDED
from disco_accel.step.update.pending_update import (
    MASTER,
    PIECE_BY_HAND,
    GradientsAway,
    ParameterUpdate,
    part_of,
    settings_of,
    why_not,
)

logger = logging.getLogger("disco_accel")

_MOMENTS = ("exp_avg", "exp_avg_sq")
_BITS = torch.int16

_ADOPTED = (
    "master_weights: fp32: the optimizer's state has no masters, as one of a script without them: they begin as the "
    "weights are, the moments as they are"
)
_CAST = (
    "master_weights: fp32: the optimizer's masters were cast, as load_state_dict does to an optimizer of a model that "
    "is not prepared yet: they begin anew as the weights are. Load the state behind prepare()"
)
_WRITTEN = (
    "master_weights: fp32: weights were written to by somebody else than their optimizer: their masters begin anew as "
    "these are, where they have changed"
)

_masters: weakref.WeakSet[MasterWeights] = weakref.WeakSet()


class MasterWeights:
    """Of one prepared model, until ``remove``. Masters and moments are in the state of the weights' optimizers.

    Used under the session's lock, which ``lock`` is.
    """

    def __init__(self, model: torch.nn.Module, lock: Any, say: Callable[[str], None]) -> None:
        """``say`` tells the user something, once."""
        self._model, self._lock, self._say = weakref.ref(model), lock, say
        self._handles: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
        self._away = GradientsAway()
        _masters.add(self)
        _hook_all_optimizers()

    def remove(self) -> None:
        """Optimizers update the weights themselves from now on; each gives its masters up at its next step."""
        _masters.discard(self)
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def weights(self) -> set[int]:
        """Ids of the model's parameters that have masters if they are trained."""
        model = self._model()
        return set() if model is None else {id(p) for p in model.parameters() if p.dtype in ROUNDED}

    def of(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Those that ``optimizer`` updates."""
        weights = self.weights()
        return [p for group in optimizer.param_groups for p in group["params"] if id(p) in weights]

    def update_last(self, optimizer: torch.optim.Optimizer) -> None:
        """Make ``update`` the last hook that runs before ``optimizer.step()``: others may clip gradients."""
        if optimizer in self._handles:
            self._handles[optimizer].remove()
        self._handles[optimizer] = optimizer.register_step_pre_hook(_Update(self))

    def ready(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare the state of ``optimizer`` for its next update. Raises ConfigError as ``update``."""
        with self._lock, torch.no_grad():
            _follow_weights(self._parts(optimizer), self._say, run=False)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Update masters and their weights as ``optimizer.step()`` is to, and take the used gradients away.

        Raises:
            ConfigError: it cannot be done; nothing is.
        """
        with self._lock, torch.no_grad():
            parts = self._parts(optimizer)
            for part in parts:
                part.steps.add_(1)
            _follow_weights(parts, self._say, run=True)
            self._away.take(parts)

    def _parts(self, optimizer: torch.optim.Optimizer) -> list[ParameterUpdate]:
        """Those of the weights with masters, whose state is made where it is missing."""
        if not any(p.grad is not None for p in self.of(optimizer)):
            return []
        reason, weights, parts = why_not(optimizer), self.weights(), []
        if reason is not None:
            raise _refusal(reason)
        for group in optimizer.param_groups:
            settings, lr = settings_of(group)
            for parameter in group["params"]:
                if id(parameter) not in weights or parameter.grad is None or not parameter.numel():
                    continue
                if not parameter.is_contiguous() or not parameter.is_cpu:
                    raise _refusal(f"a parameter of shape {list(parameter.shape)} is no contiguous CPU tensor")
                _keep(parameter, optimizer.state[parameter], self._say)
                part = part_of(parameter, optimizer.state[parameter], lr, settings)
                if isinstance(part, str):
                    raise _refusal(part)
                parts.append(part)
        return parts


class _Update:
    """The hook that updates."""

    def __init__(self, masters: MasterWeights) -> None:
        self._masters = weakref.ref(masters)

    def __call__(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        masters = self._masters()
        if masters is None:
            return None
        # The first of the arguments is the optimizer itself.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            # It makes the gradients.
            with torch.enable_grad():
                loss = closure()
            args, kwargs = (optimizer, lambda: loss), {k: v for k, v in kwargs.items() if k != "closure"}
        masters.update(optimizer)
        return args, kwargs


def _refusal(reason: str) -> ConfigError:
    return ConfigError(
        f"master_weights: fp32: {reason}; masters are updated by torch.optim.AdamW and Adam with fused=True, in their "
        "plain form and without a GradScaler: use that, or master_weights: script"
    )


@functools.cache
def _hook_all_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)
    # PyTorch has no hook for all optimizers here, and a state is loaded before the first step.
    optimizer: Any = torch.optim.Optimizer
    optimizer.load_state_dict = _keeping_fp32(optimizer.load_state_dict)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    kept: set[int] = set()
    for masters in list(_masters):
        ours = masters.of(optimizer)
        if ours:
            kept.update(map(id, ours))
            masters.update_last(optimizer)
    left = [(p, state) for p, state in optimizer.state.items() if MASTER in state and id(p) not in kept]
    if left:
        logger.warning(
            "the optimizer has fp32 masters of %d weights that are of another dtype now, or of a model that is not "
            "prepared with master_weights: fp32: it updates these weights themselves from now on, in their dtype",
            len(left),
        )
    for parameter, state in left:
        _give_up(parameter, state)


def _keeping_fp32(load: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load)
    def load_state_dict(self: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        kept = {id(p) for masters in list(_masters) for p in masters.of(self)}
        if not kept:
            return load(self, state_dict)
        loading = _Loading(lambda parameter: id(parameter) in kept)
        handles = [
            self.register_load_state_dict_pre_hook(loading.before),
            self.register_load_state_dict_post_hook(loading.behind, prepend=True),
        ]
        try:
            return load(self, state_dict)
        finally:
            for handle in handles:
                handle.remove()

    return load_state_dict


def _keep(parameter: torch.Tensor, state: dict[str, Any], say: Callable[[str], None]) -> None:
    """Make tensors of ``state`` that an update of ``parameter`` by way of its master needs and that are missing."""
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state[MASTER] = _widened(parameter)
        state |= {name: torch.zeros_like(state[MASTER]) for name in _MOMENTS}
        return
    master = state.get(MASTER)
    if master is None or master.dtype is not torch.float32:
        say(_ADOPTED if master is None else _CAST)
        state[MASTER] = _widened(parameter)
    for name in _MOMENTS:
        state[name] = state[name].to(torch.float32)


def _follow_weights(parts: Iterable[ParameterUpdate], say: Callable[[str], None], *, run: bool) -> None:
    """Set masters to their parameters wherever these are not their rounded values; ``run``: then update."""
    written = False
    for part in parts:
        assert part.master is not None
        count = part.parameter.numel()
        # Piece by piece, while it is in the processor's caches.
        for begin in range(0, count, PIECE_BY_HAND):
            end = min(begin + PIECE_BY_HAND, count)
            written |= _follow_piece(part.master.view(-1)[begin:end], part.parameter.detach().view(-1)[begin:end])
            if run:
                part.run(begin, end)
    if written:
        say(_WRITTEN)


def _give_up(parameter: torch.Tensor, state: dict[str, Any]) -> None:
    """Make ``state`` that of an optimizer without masters."""
    del state[MASTER]
    state |= {name: state[name].to(parameter.dtype) for name in _MOMENTS if name in state}


def _widened(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().to(torch.float32)


def _follow_piece(master: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a weight was not the rounded value of its master."""
    rounded, bits = master.to(weight.dtype).view(_BITS), weight.view(_BITS)
    if torch.equal(rounded, bits):
        return False
    master.copy_(torch.where(rounded == bits, master, weight.to(torch.float32)))
    return True


class _Loading:
    """Hooks around one ``load_state_dict`` of an optimizer, which casts its input to the dtypes of the parameters: one
    takes float32 tensors away before, one puts them in behind."""

    def __init__(self, has_master: Callable[[torch.Tensor], bool]) -> None:
        """``has_master``: of a parameter."""
        self._has_master = has_master
        self._taken: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def before(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The hook before it: ``state_dict`` without tensors that would be cast."""
        parameters = dict(zip(_of_groups(state_dict["param_groups"]), _of_groups(optimizer.param_groups), strict=False))
        states = dict(state_dict["state"])
        for number, state in states.items():
            parameter = parameters.get(number)
            if parameter is None or not isinstance(state, dict) or not self._has_master(parameter):
                continue
            taken = {
                name: value.to(parameter.device).contiguous()
                for name in (MASTER, *_MOMENTS)
                if isinstance(value := state.get(name), torch.Tensor) and value.dtype is torch.float32
            }
            self._taken[parameter] = taken
            states[number] = {name: value for name, value in state.items() if name not in taken}
        return {**state_dict, "state": states}

    def behind(self, optimizer: torch.optim.Optimizer) -> None:
        """The hook behind it."""
        for parameter, taken in self._taken.items():
            optimizer.state[parameter].update(taken)
        self._taken.clear()


def _of_groups(groups: list[dict[str, Any]]) -> Iterator[Any]:
    return itertools.chain.from_iterable(group["params"] for group in groups)
