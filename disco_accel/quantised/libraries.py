"""The table of libraries that pack weights, and questions to all of them together."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from disco_accel.quantised.bitsandbytes import BITSANDBYTES
from disco_accel.quantised.forms import PackedForm, StoredForm
from disco_accel.quantised.hqq import HQQ
from disco_accel.quantised.library import QuantLibrary
from disco_accel.quantised.quanto import QUANTO
from disco_accel.quantised.torchao import TORCHAO

LIBRARIES: tuple[QuantLibrary, ...] = (BITSANDBYTES, TORCHAO, HQQ, QUANTO)

PACKED_PARAMETERS = frozenset(name for library in LIBRARIES for name in library.packed_parameters)
STATES = frozenset(name for library in LIBRARIES for name in library.states)
OWN_STATES = frozenset(name for library in LIBRARIES for name in library.own_states)
STATE_TABLES: Mapping[str, str] = MappingProxyType({k: v for each in LIBRARIES for k, v in each.state_tables.items()})
REWRITTEN: Mapping[str, frozenset[str]] = MappingProxyType(
    {k: v for library in LIBRARIES for k, v in library.rewritten.items()}
)
STORED_FORMS: Mapping[PackedForm, StoredForm] = MappingProxyType(
    {form: stored for library in LIBRARIES for form, stored in library.forms.items()}
)
"""Those of ``QuantLibrary``, of all libraries."""


def library_of_config(quantization_config: Any) -> QuantLibrary | None:
    """The library of a ``quantization_config``, an object of transformers' or a dict that it wrote; None for others."""
    method = value_of(quantization_config, "quant_method")
    for library in LIBRARIES:
        if method is None and any(value_of(quantization_config, key) for key in library.old_keys):
            return library
        if library.quant_method and str(getattr(method, "value", method)) == library.quant_method:
            return library
    return None


def form_of_config(quantization_config: Mapping[str, Any]) -> PackedForm | None:
    """The form that a checkpoint's ``quantization_config`` names; None where its sizes are not known."""
    said = {key: value for key, value in quantization_config.items() if value is not None}
    for library in LIBRARIES:
        if said.get("quant_method") != library.quant_method:
            continue
        for form, stored in library.forms.items():
            asked = stored.asked_by.items()
            if asked and all(said.get(key, library.config_defaults.get(key)) == value for key, value in asked):
                return form
    return None


def value_of(quantization_config: Any, key: str) -> Any:
    """The entry ``key`` of a ``quantization_config``; None where it has none."""
    if isinstance(quantization_config, Mapping):
        return quantization_config.get(key)
    return getattr(quantization_config, key, None)


def library_of_form(form: PackedForm) -> QuantLibrary:
    """The one that stores weights so."""
    return next(library for library in LIBRARIES if form in library.forms)


def library_names() -> str:
    """All of them, for messages: ``a, b or c``."""
    *first, last = (library.name for library in LIBRARIES)
    return f"{', '.join(first)} or {last}"
