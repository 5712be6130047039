"""The fp32 masters and moments of bf16 and fp16 weights, in the state of the optimizer that has the weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from disco_accel.step.update.pending_update import MASTER, PIECE_BY_HAND, ParameterUpdate

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

Say = Callable[[str], None]
"""Tells the user something, once."""


def keep(parameter: torch.Tensor, state: dict[str, Any], say: Say) -> None:
    """Have in ``state`` what an update of ``parameter`` by way of its master needs."""
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


def follow(parts: Iterable[ParameterUpdate], say: Say, *, run: bool) -> None:
    """Let masters be what their parameters are wherever these are not their rounded values; ``run``: then update."""
    written = False
    for part in parts:
        assert part.master is not None
        count = part.parameter.numel()
        # Piece by piece, while it is in the processor's caches.
        for begin in range(0, count, PIECE_BY_HAND):
            end = min(begin + PIECE_BY_HAND, count)
            written |= _follow(part.master.view(-1)[begin:end], part.parameter.detach().view(-1)[begin:end])
            if run:
                part.run(begin, end)
    if written:
        say(_WRITTEN)


def give_up(parameter: torch.Tensor, state: dict[str, Any]) -> None:
    """Leave in ``state`` what an optimizer has that knows of no masters."""
    del state[MASTER]
    state |= {name: state[name].to(parameter.dtype) for name in _MOMENTS if name in state}


def _widened(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().to(torch.float32)


def _follow(master: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether there was such a place."""
    rounded, bits = master.to(weight.dtype).view(_BITS), weight.view(_BITS)
    if torch.equal(rounded, bits):
        return False
    master.copy_(torch.where(rounded == bits, master, weight.to(torch.float32)))
    return True


class Loading:
    """Around one ``load_state_dict`` of an optimizer, which casts what it loads to the dtypes of the parameters: takes
    what is float32 away before, and puts it in behind."""

    def __init__(self, has_master: Callable[[torch.Tensor], bool]) -> None:
        """``has_master``: of a parameter."""
        self._has_master = has_master
        self._taken: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def before(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The hook before it: ``state_dict`` without what would be cast."""
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
