"""What a planned training step returns in place of the model's own output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree
from transformers.utils import ModelOutput

from disco_accel.integrate.dynamo import not_compiled

Gradients = Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
"""From the gradient of a value to those of the trainable parameters, by name."""
GradientsOf = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""As ``Gradients``, from the gradients of several values by their paths."""


class Reader(Protocol):
    """Finds what a step was not planned to return."""

    def __call__(self, name: str) -> Any:
        """A field by its name. Raises AttributeError if there is none."""

    def fields(self) -> tuple[str, ...]:
        """The names of all fields, in their order; none where the model returns something that has none."""


_READER = "_disco_reader"
_Spec = tuple[tuple[str, ...], Reader | None]


class _NotByItsFields:
    """Keeps ModelOutput from registering a pytree that is made again from its items alone."""

    def __init_subclass__(cls) -> None:
        pass


@dataclass(init=False, eq=False)
class StepOutput(_NotByItsFields, ModelOutput):
    """The values that a step was planned to return, by field of the model's own output.

    Any other field is found by one more forward when it is first read. Who does so again gets it planned.
    """

    def __init__(self, values: Mapping[str, torch.Tensor], reader: Reader | None = None) -> None:
        """``reader``: finds a field that is not in ``values``."""
        for name, value in values.items():
            self[name] = value
            # Accelerate makes a new output from the items of this one when it casts them.
            reader = reader or getattr(value, _READER, None)
        for value in values.values():
            setattr(value, _READER, reader)
        self.__dict__[_READER] = reader

    def __getattr__(self, name: str) -> Any:
        reader = self.__dict__.get(_READER)
        if name.startswith("__") or reader is None:
            raise AttributeError(name)
        self.__dict__[name] = value = reader(name)
        return value

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.get(key) if key in self.keys() else getattr(self, key)
        if key == 0 and "loss" in self.keys():
            return self.loss
        # Only what is asked for is read: a field that the plan does not have costs a forward.
        picked = self._names()[key]
        return self[picked] if isinstance(picked, str) else tuple(self[name] for name in picked)

    def to_tuple(self) -> tuple[Any, ...]:
        """What the model's own output has, in its order."""
        return tuple(self[name] for name in self._names())

    def _names(self) -> tuple[str, ...]:
        reader = self.__dict__.get(_READER)
        return (reader.fields() if reader is not None else ()) or tuple(self.keys())


def _flatten(output: StepOutput) -> tuple[list[Any], _Spec]:
    return list(output.values()), (tuple(output.keys()), output.__dict__[_READER])


def _unflatten(leaves: Iterable[Any], spec: _Spec) -> StepOutput:
    names, reader = spec
    return StepOutput(dict(zip(names, leaves, strict=True)), reader)


# DistributedDataParallel with find_unused_parameters or static_graph takes the output apart and makes it again.
pytree.register_pytree_node(StepOutput, _flatten, _unflatten, serialized_type_name="disco_accel.StepOutput")


class _Elsewhere(torch.autograd.Function):
    """A value whose gradient other code takes to the parameters."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, gradients: Gradients, names: tuple[str, ...], *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.gradients, ctx.names = gradients, names
        # DDP's node behind a value that no loss depends on passes no gradient on; zeros would cost a step.
        ctx.set_materialize_grads(False)
        return value.detach()

    @staticmethod
    @not_compiled
    def backward(ctx: Any, tangent: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        found = {} if tangent is None else ctx.gradients(tangent)
        return (None, None, None, *(found.get(name) for name in ctx.names))


def with_gradient(value: torch.Tensor, parameters: Mapping[str, torch.Tensor], gradients: Gradients) -> torch.Tensor:
    """``value`` as a function of ``parameters`` whose backward is ``gradients``."""
    result: torch.Tensor = _Elsewhere.apply(value, gradients, tuple(parameters), *parameters.values())
    return result


class _Together(torch.autograd.Function):
    """Values whose gradients other code takes to the parameters, all at once."""

    @staticmethod
    def forward(
        ctx: Any, paths: tuple[str, ...], gradients: GradientsOf, names: tuple[str, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.paths, ctx.gradients, ctx.names = paths, gradients, names
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors[: len(paths)])

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        arrived = {path: t for path, t in zip(ctx.paths, tangents, strict=True) if t is not None}
        found = ctx.gradients(arrived) if arrived else {}
        return (None, None, None, *(None for _ in ctx.paths), *(found.get(name) for name in ctx.names))


def with_gradients(
    values: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor], gradients: GradientsOf
) -> dict[str, torch.Tensor]:
    """``values`` as functions of ``parameters``, which ``gradients`` differentiates together."""
    made: Any = _Together.apply(tuple(values), gradients, tuple(parameters), *values.values(), *parameters.values())
    return dict(zip(values, made, strict=True))
