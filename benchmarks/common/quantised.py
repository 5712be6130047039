"""Forms of frozen weights for the benchmarks: the library that packs each, where it is, and the bytes of them all."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common.shapes import Shape, frozen_bytes
from disco_accel.errors import ConfigError
from disco_accel.measure.quantised_estimate import packed_bytes
from disco_accel.quantised.forms import PackedForm, PackedWeight
from tests.support.quantised import Quantise, bnb_4bit, bnb_int8, torchao

APART = Path(sys.prefix) / "quantised"
"""Where ``make setup`` puts the libraries, not on the path: PEFT imports them wherever it finds them."""


@dataclass(frozen=True, slots=True)
class Form:
    """``library`` is the module that packs layers as ``packed`` says."""

    library: str
    packed: PackedForm
    quantise: Quantise


FORMS: Mapping[str, Form] = {
    form.packed.value: form
    for form in (
        Form("bitsandbytes", PackedForm.NF4, bnb_4bit()),
        Form("bitsandbytes", PackedForm.NF4_NESTED, bnb_4bit(nested=True)),
        # With a threshold, the columns of outliers would have to be counted on the device at every step.
        Form("bitsandbytes", PackedForm.INT8, bnb_int8(threshold=0.0)),
        Form("torchao", PackedForm.FP8, torchao("Float8WeightOnlyConfig")),
    )
}
PLAIN = "none"
NAMES = (*FORMS, PLAIN)


def quantise_of(form: str) -> Quantise | None:
    """What packs a module's linear layers in place; None for ``none``."""
    return None if form == PLAIN else FORMS[form].quantise


def folder_of(form: str) -> str:
    """The folder that a process has on its path to train with ``form``; empty where it needs none.

    Raises:
        ConfigError: its library is not installed.
    """
    if form == PLAIN:
        return ""
    library = FORMS[form].library
    if importlib.util.find_spec(library) is not None:
        return ""
    if (APART / library).is_dir():
        return str(APART)
    raise ConfigError(f"--quant {form}: needs {library}, which is not installed; run: pip install {library}")


def versions(forms: Sequence[str]) -> dict[str, str]:
    """The versions of the libraries that pack ``forms``. Raises ConfigError as ``folder_of``."""
    found = {}
    for form in forms:
        if form != PLAIN:
            name, path = FORMS[form].library, [folder_of(form), *sys.path]
            found[name] = next(iter(importlib.metadata.distributions(name=name, path=path))).version
    return found


def weight_bytes(shape: Shape, form: str, dtype: torch.dtype) -> int:
    """Bytes of the frozen weights of a Llama; embedding, output layer and norms stay as they are."""
    plain = frozen_bytes(shape, dtype.itemsize)
    if form == PLAIN:
        return plain
    hidden, ffn = shape["hidden_size"], shape["intermediate_size"]
    narrow = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    matrices = [*[(hidden, hidden)] * 2, *[(narrow, hidden)] * 2, *[(ffn, hidden)] * 2, (hidden, ffn)]
    packed = FORMS[form].packed
    saved = sum(r * c * dtype.itemsize - packed_bytes(PackedWeight(packed, r, c, "")) for r, c in matrices)
    return plain - shape["num_hidden_layers"] * saved
