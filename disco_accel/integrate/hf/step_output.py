"""The output of a planned training step, in place of the model's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers.utils.generic import ModelOutput

from disco_accel.step.run.rerun import Rerun

_READER = "_disco_reader"
_Spec = tuple[tuple[str, ...], Rerun | None]


class _NotByItsFields:
    """Keeps ModelOutput from registering a pytree that is made again from its items alone."""

    def __init_subclass__(cls) -> None:
        pass


@dataclass(init=False, eq=False)
class StepOutput(_NotByItsFields, ModelOutput):
    """The values that a step was planned to return, by field of the model's own output.

    Any other field is found by one more forward when it is first read; a second read gets it planned.
    """

    def __init__(self, values: Mapping[str, torch.Tensor], reader: Rerun | None = None) -> None:
        """``reader``: finds a field that is not in ``values``."""
        for name, value in values.items():
            self[name] = value
            # Accelerate makes a new output from the items of this one when it casts them.
            reader = reader or getattr(value, _READER, None)
        for value in values.values():
            setattr(value, _READER, reader)
        for name in values:
            if reader is not None and not hasattr(type(self), name):
                # Its first reader is met by ``__getattr__``.
                del self.__dict__[name]
        self.__dict__[_READER] = reader

    def __getattr__(self, name: str) -> Any:
        reader = self.__dict__.get(_READER)
        if name.startswith("__") or reader is None:
            raise AttributeError(name)
        if name in self.keys():
            reader.returned(name)
        self.__dict__[name] = value = self.get(name) if name in self.keys() else reader(name)
        return value

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.get(key) if key in self.keys() and hasattr(type(self), key) else getattr(self, key)
        if key == 0 and "loss" in self.keys():
            return self.loss
        # Only what is asked for is read: a field that the plan does not have costs a forward.
        picked = self._names()[key]
        return self[picked] if isinstance(picked, str) else tuple(self[name] for name in picked)

    def to_tuple(self) -> tuple[Any, ...]:
        """The fields of the model's own output, in its order."""
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
