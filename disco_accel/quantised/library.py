"""A library that packs weights: its facts and methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from disco_accel.quantised.forms import PackedForm, StoredForm


class FileTensor(Protocol):
    """A tensor of a checkpoint's file."""

    @property
    def file(self) -> Path: ...
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def room(self) -> int:
        """Bytes held at most while it is read, its own among them."""

    def read(self) -> torch.Tensor:
        """Its values, in memory of their own. Raises ConfigError."""


@dataclass(frozen=True)
class QuantLibrary:
    """One library, recognised by names of classes: it need not be installed. A library that needs one of the methods
    is a subclass in a file of its own, entered in ``libraries.py``; here they do nothing.

    Data: how it is called (``name``, pip's ``package``, the ``module`` to import, transformers' ``quant_method``), and
    the places where the tensors of its weights are, beside traceable wrapper subclasses.
    """

    name: str
    package: str
    quant_method: str = ""
    """Empty for a library whose checkpoints ``from_pretrained`` alone loads."""
    module: str = ""
    old_keys: tuple[str, ...] = ()
    """Keys of a ``quantization_config`` without ``quant_method`` that say it is this library's."""
    config_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that a ``quantization_config`` leaves out."""
    needs_headers: bool = False
    """The headers of its files name the weights that tensors are parts of; transformers reads these from files
    alone."""
    packed_parameters: frozenset[str] = frozenset()
    """Subclasses of Parameter whose own bytes are the packed weight, with scales in objects beside it."""
    states: frozenset[str] = frozenset()
    """Classes of objects beside a weight whose tensors belong to it."""
    state_tables: Mapping[str, str] = field(default_factory=dict)
    """Class of layers → their attribute that is a dict of such tensors."""
    own_states: frozenset[str] = frozenset()
    """Attributes of layers whose tensors are named as if they were in the weight."""
    rewritten: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Class → attributes that each forward sets anew before it reads them."""
    tensor_patches: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = field(default_factory=dict)
    """Method of ``torch.Tensor`` → a function that makes its replacement while a step is traced over fakes."""
    forms: Mapping[PackedForm, StoredForm] = field(default_factory=dict)
    """The forms whose sizes and calls are known without the library."""

    def settle(self, model: torch.nn.Module) -> None:
        """Change its layers' weights as each of their forwards does: a plan runs in the place of that forward."""

    def run_first_forward(self, model: torch.nn.Module, *, on_host: bool, gradients: bool) -> None:
        """Leave its layers as their first forward would, where that assigns to ``.data``: no graph can say so."""

    def lost_scales(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, str, bool]]:
        """Its packed weights without scales: name, weight, attribute of the scales, whether its bytes are packed."""
        return iter(())

    def check_stored(self, stored: Mapping[str, FileTensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check all packed weights of a checkpoint. ``shapes``: those of the model's parameters before packing, by
        name. Raises ConfigError naming file and tensor."""

    def dequantised(self, stored: Mapping[str, FileTensor]) -> dict[str, FileTensor] | None:
        """The tensors of a checkpoint with plain weights in the places of packed ones, dequantised when they are read,
        by the library. None: that is not known of its files. Raises ConfigError, as ``check_stored``."""
        return None

    def check_loaded(self, directory: Path, model: torch.nn.Module) -> None:
        """Check that all packed weights of the model in ``directory`` have their scales. Raises ConfigError."""
