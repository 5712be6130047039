"""Packed frozen weights: the form that a recipe's keys ask for, and the same for a model without weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from disco_accel.capture.captured_step import CapturedStep, InputBinding
from disco_accel.errors import ConfigError
from disco_accel.measure.quantised_estimate import packed, packed_bytes, part_vertices
from disco_accel.quantised.forms import PackedForm, PackedWeight
from disco_accel.quantised.libraries import form_of_config, library_of_form
from disco_accel.recipes.settings import LoraRecipe, PrefillRecipe


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """``weights``: how many have ``form``; ``bytes`` they take with scales and tables, and ``unpacked`` before."""

    form: PackedForm
    weights: int
    bytes: int
    unpacked: int

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"form": self.form, "weights": self.weights, "packed_bytes": self.bytes, "bytes_before": self.unpacked}


def asked_form(recipe: LoraRecipe | PrefillRecipe) -> PackedForm | None:
    """What ``load_in_4bit`` and the keys beside it say; None for weights as they are."""
    if recipe.load_in_8bit:
        return PackedForm.INT8
    if not recipe.load_in_4bit:
        return None
    return PackedForm(recipe.bnb_4bit_quant_type + ("-nested" if recipe.use_bnb_nested_quant else ""))


def stored_form(config: Any) -> PackedForm | None:
    """How the weights of a checkpoint are packed already, by its config; None if they are not.

    Raises:
        ConfigError: nobody here knows the sizes of that form.
    """
    given = _stored_config(config)
    if given is None:
        return None
    form = form_of_config(given)
    if form is not None:
        return form
    raise ConfigError(
        f"model_name_or_path: its weights are packed by {given.get('quant_method', 'an unknown library')}, whose sizes "
        "are not known without them; --quant plans it as if they had another form"
    )


def _stored_config(config: Any) -> dict[str, Any] | None:
    given = getattr(config, "quantization_config", None)
    if given is None or isinstance(given, dict):
        return given
    return dict(given.to_dict())


def packing_config(recipe: LoraRecipe | PrefillRecipe, config: Any) -> Any:
    """The ``quantization_config`` that ``from_pretrained`` is told, as TRL tells it: products are computed in the
    recipe's ``dtype``. None for weights as they are.

    Raises:
        ConfigError: the library that packs is not installed.
    """
    form = asked_form(recipe)
    if form is None:
        return None
    library = library_of_form(form)
    stored = library.forms[form]
    if importlib.util.find_spec(library.module) is None:
        key = "load_in_4bit" if form.in_four_bits else "load_in_8bit"
        raise ConfigError(
            f"{key}: {library.name} packs the weights, and is not installed: pip install {library.package}"
        )
    dtype = {stored.dtype_key: computed_in(recipe, config)} if stored.dtype_key else {}
    return AutoQuantizationConfig.from_dict({"quant_method": library.quant_method, **stored.asked_by, **dtype})


def computed_in(recipe: LoraRecipe | PrefillRecipe, config: Any) -> torch.dtype:
    """The data type of the weights that are not packed."""
    if recipe.dtype != "auto":
        return getattr(torch, recipe.dtype)  # type: ignore[no-any-return]
    return getattr(config, "dtype", None) or torch.float32


class _LinearShape(NamedTuple):
    """Of a linear layer's weight, and whether it is stored with inputs first."""

    outputs: int
    inputs: int
    inputs_first: bool


def packable(model: PreTrainedModel) -> dict[int, _LinearShape]:
    """Identity of each weight that transformers packs → its shape: those of linear layers, but not of the output layer,
    of tied ones and of those that the model or its config keeps."""
    stored = _stored_config(model.config) or {}
    asked = stored.get("llm_int8_skip_modules") or None
    kept = HfQuantizer.get_modules_to_not_convert(model, asked, getattr(model, "_keep_in_fp32_modules", None))
    found = {}
    for name, module in model.named_modules():
        if not should_convert_module(name, kept):
            continue
        if type(module) is torch.nn.Linear:
            found[id(module.weight)] = _LinearShape(module.out_features, module.in_features, False)
        elif isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape
            found[id(module.weight)] = _LinearShape(outputs, inputs, True)
    return found


def with_packed_weights(
    captured: CapturedStep, model: torch.nn.Module, shapes: dict[int, _LinearShape], form: PackedForm
) -> tuple[CapturedStep, PackedWeights]:
    """The step with the weights of ``shapes`` in ``form``, and what they are then.

    ``model``: that of the step, which has the weights that ``packable`` found.
    """
    names = {name: shapes[id(p)] for name, p in model.named_parameters() if id(p) in shapes and not p.requires_grad}
    bound = {b.vertex: b for b in captured.bindings if b.name in names}
    packing = {
        v: PackedWeight(form, shape.outputs, shape.inputs, b.spec.dtype, shape.inputs_first)
        for v, b in bound.items()
        for shape in (names[b.name],)
    }
    places = part_vertices(captured.graph, packing)

    def bindings() -> Iterator[InputBinding]:
        for binding in captured.bindings:
            if binding.vertex not in places:
                yield binding
            for vertex, part in places.get(binding.vertex, ()):
                yield InputBinding(vertex, binding.source, binding.name + part.suffix, part.spec)

    before = {v.id: v.sizes[0] for v in captured.graph.vertices}
    sizes = PackedWeights(form, len(packing), sum(map(packed_bytes, packing.values())), sum(before[v] for v in packing))
    return captured.through([packed(packing, form)], bindings=tuple(bindings())), sizes
