"""bitsandbytes: packed bytes in a Parameter, scales in objects beside it (``QuantState``, which may hold a second one,
and ``MatmulLtState``); blocks of 64 weights under one scale, of 256 scales where these are packed too.

The library takes the parts that it finds in a checkpoint: with a block size that is off by a bit it computes other
numbers, or reads behind a scale's end. So they are checked against each other, in the files and in the model made of
them.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from disco_accel.errors import ConfigError
from disco_accel.graph.taskgraph import EnumArg, TensorArg
from disco_accel.native.host_memory import place
from disco_accel.quantised.forms import (
    DequantiseCall,
    PackedForm,
    PackedPart,
    PackedWeight,
    StoredForm,
    cast_call,
    dense,
)
from disco_accel.quantised.library import FileTensor, QuantLibrary

_PACKED = frozenset(("Params4bit", "Int8Params"))
_4BIT_LAYERS = frozenset(("Linear4bit", "Embedding4bit"))
_4BIT_PARAMETRISATIONS = frozenset(("Bnb4bitParametrization",))
_CONVERT = "_convert_weight_packed_for_cpu"
"""The library's own function: another order of the packed bytes, for a kernel of CPUs with AVX512 for bfloat16."""
_BLOCK = 64
"""Weights of one scale in 4 bits, by default."""
_NESTED_BLOCK = 256
"""Scales of one scale, where they are packed too."""
_STATE = re.compile(r"(?P<weight>.+)\.quant_state\.bitsandbytes__(?P<form>\w+)")
_BESIDE_4BIT = re.compile(r"(?P<weight>.+)\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+)")
_BESIDE_8BIT = re.compile(r"(?P<layer>.+)\.(SCB|weight_format)")
_FORMS = ("nf4", "fp4")
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers under one scale that bitsandbytes has kernels for."""
_PLAIN_KEYS = {"quant_type", "blocksize", "dtype", "shape"}
_NESTED_KEYS = {"nested_blocksize", "nested_dtype", "nested_offset"}
_DTYPES = ("float16", "bfloat16", "float32")
_LAYERS = frozenset(("Linear4bit", "Linear8bitLt"))
_CODE = 16
"""Values of four bits."""
_NESTED_CODE = 256


class _Bitsandbytes(QuantLibrary):
    def settle(self, model: torch.nn.Module) -> None:
        """8 bits: scales move from a new weight to the layer's state, and the weight is again the view of the state's
        bytes that the next forward reads. 4 bits: a weight that has lost its state gets the layer's.

        Without that a planned model's layers would stay as they were loaded, and later changes of them would mean
        something else than after eager steps.
        """
        for module in model.modules():
            layer: Any = module
            weight = module._parameters.get("weight")
            if weight is None:
                continue
            if _is_a(module, _4BIT_LAYERS) and _state_of(weight) is None and _state_of(module) is not None:
                _of_its_library(module, "fix_4bit_weight_quant_state_from_module")(layer)
            state: Any = module.__dict__.get("state")
            if type(state).__name__ != "MatmulLtState" or not _is_a(weight, _PACKED):
                continue
            if weight.__dict__.get("CB") is not None:
                layer.init_8bit_state()
            packed = vars(state).get("CB")
            if not state.has_fp16_weights and packed is not None and place(packed) != place(weight):
                weight.data = packed

    def run_first_forward(self, model: torch.nn.Module, *, on_host: bool, gradients: bool) -> None:
        for module in model.modules():
            if _is_a(module, frozenset(("Linear4bit",))):
                _cast_bias(module)
                if on_host and not (gradients or module.training):
                    _repack(module)

    def lost_scales(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, str, bool]]:
        for path, module in model.named_modules():
            prefix = f"{path}." if path else ""
            if type(module).__name__ in _4BIT_PARAMETRISATIONS and _state_of(module) is None:
                above = path.rpartition(".")[0]
                owner: Any = model.get_submodule(above)
                yield _lost(f"{above}.original", owner.original, "quant_state")
            weight = module._parameters.get("weight")
            if weight is None:
                continue
            if _is_a(module, _4BIT_LAYERS) and _state_of(weight) is None and _state_of(module) is None:
                yield _lost(f"{prefix}weight", weight, "quant_state")
            state = module.__dict__.get("state")
            if type(state).__name__ == "MatmulLtState" and _is_a(weight, _PACKED):
                holder = weight if weight.__dict__.get("CB") is not None else state
                if getattr(holder, "CB", None) is not None and getattr(holder, "SCB", None) is None:
                    yield _lost(f"{prefix}weight", weight, "SCB")

    def check_stored(self, stored: Mapping[str, FileTensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check all packed weights of a checkpoint. ``shapes``: name → shape of the model's parameters before packing.

        Raises:
            ConfigError: a part is missing, has no weight, is no part of that form, or has another shape or type than
                the others say; names file and tensor.
        """
        states = {
            match["weight"]: (match["form"], stored[name]) for name in stored if (match := _STATE.fullmatch(name))
        }
        for name, tensor in stored.items():
            beside = _BESIDE_4BIT.fullmatch(name)
            if beside and beside["weight"] not in states:
                raise _wrong(tensor, f"is part of a packed weight, and {beside['weight']} has no quant_state")
            if beside and name.count("quant_state") and states[beside["weight"]][1] is not tensor:
                raise _wrong(tensor, f"is a second quant_state beside {states[beside['weight']][1].name}")
            layer = _BESIDE_8BIT.fullmatch(name)
            if layer and not _in_8_bits(stored, f"{layer['layer']}.weight"):
                raise _wrong(tensor, f"is part of a packed weight, and {layer['layer']}.weight is none of 8 bits")
        for weight, (form, tensor) in states.items():
            _check_4bit(stored, weight, form, tensor, shapes.get(weight))
        for name in stored:
            if name not in states and (name in shapes or _in_8_bits(stored, name)):
                _check_unpacked_or_8bit(stored, name, shapes.get(name))

    def dequantised(self, stored: Mapping[str, FileTensor]) -> dict[str, FileTensor] | None:
        self.check_stored(stored, {})
        found: dict[str, FileTensor] = {}
        for name, tensor in stored.items():
            parts = {n: t for n, t in stored.items() if n.startswith(f"{name}.")}
            state = next((t for n, t in parts.items() if _STATE.fullmatch(n)), None)
            scales = stored.get(f"{name.removesuffix('.weight')}.SCB")
            if state is not None:
                if not name.endswith(".weight"):
                    raise _wrong(tensor, "is no layer's weight; the library dequantises those alone")
                said = _state(state)
                found[name] = _Dequantised(tensor, parts, getattr(torch, said["dtype"]), tuple(said["shape"]))
            elif tensor.dtype is torch.int8 and scales is not None:
                found[name] = _Dequantised(tensor, {scales.name: scales}, torch.float32, tensor.shape)
            elif not _BESIDE_4BIT.fullmatch(name) and not _BESIDE_8BIT.fullmatch(name):
                found[name] = tensor
        return found

    def check_loaded(self, directory: Path, model: torch.nn.Module) -> None:
        """Check that all packed weights of a model have their scales, as many as the layer's shape says.

        Raises:
            ConfigError: names the weight.
        """
        for name, module, weight in _packed_weights(model):
            state = _state_of(weight)
            scales = getattr(weight, "SCB", None)
            whole = False
            if state is not None:
                whole = (
                    tuple(state.shape) == (module.out_features, module.in_features)
                    and weight.nbytes == -(-math.prod(state.shape) // 2)
                    and state.absmax.numel() == -(-math.prod(state.shape) // state.blocksize)
                )
            elif scales is not None:
                whole = weight.shape == (module.out_features, module.in_features) and scales.shape == weight.shape[:1]
            elif getattr(weight, "has_fp16_weights", False):
                whole = weight.dtype.is_floating_point
            if not whole:
                raise ConfigError(
                    f"{directory}: {name} is a {type(weight).__name__} of shape {list(weight.shape)} whose scales are "
                    "missing or do not fit its layer; the checkpoint and its quantization_config are not of one form"
                )


@dataclass(frozen=True, slots=True)
class _Dequantised:
    """A weight of ``packed`` numbers, with the other ``parts`` by name, as the library dequantises it."""

    packed: FileTensor
    parts: Mapping[str, FileTensor]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def file(self) -> Path:
        return self.packed.file

    @property
    def name(self) -> str:
        return self.packed.name

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def room(self) -> int:
        """In 8 bits a product is made of the numbers and their scales, and then a second one; in 4 bits the scales
        are unpacked."""
        parts = sum(tensor.nbytes for tensor in (self.packed, *self.parts.values()))
        scales = next((t for n, t in self.parts.items() if n.endswith(".absmax")), None)
        unpacked = self.nbytes if scales is None else 4 * math.prod(scales.shape)
        return parts + self.nbytes + unpacked

    def read(self) -> torch.Tensor:
        from bitsandbytes import functional

        numbers = self.packed.read()
        parts = {name: tensor.read() for name, tensor in self.parts.items()}
        if numbers.dtype is torch.int8:
            (scales,) = parts.values()
            eighths: torch.Tensor = functional.int8_vectorwise_dequant(numbers, scales)
            return eighths
        state = functional.QuantState.from_dict(parts, device=torch.device("cpu"))
        fourths: torch.Tensor = functional.dequantize_4bit(numbers, state)
        return fourths


def _is_a(value: object, names: frozenset[str]) -> bool:
    """Whether the class of ``value``, or one that it is derived from, has one of these ``names``."""
    return not names.isdisjoint(c.__name__ for c in type(value).__mro__)


def _state_of(owner: Any) -> Any:
    """The ``quant_state`` of a weight or layer, which says how packed bytes are read; None without."""
    return getattr(owner, "quant_state", None)


def _lost(name: str, weight: torch.Tensor, attribute: str) -> tuple[str, torch.Tensor, str, bool]:
    is_packed = not weight.is_floating_point() or getattr(weight, "bnb_quantized", False)
    return name, weight, attribute, is_packed


def _of_its_library(module: torch.nn.Module, name: str) -> Callable[[Any], None]:
    """The function ``name`` of the library whose layer ``module`` is, or is derived from; one that does nothing where
    there is none."""
    defined = (getattr(sys.modules.get(c.__module__), name, None) for c in type(module).__mro__)
    return next((function for function in defined if function is not None), lambda _: None)


def _cast_bias(layer: Any) -> None:
    dtype, bias = getattr(layer, "compute_dtype", None), layer.bias
    if dtype is not None and bias is not None and bias.dtype is not dtype and not bias.requires_grad:
        bias.data = bias.data.to(dtype)


def _repack(layer: Any) -> None:
    state = _state_of(layer.weight)
    if state is None or getattr(state, "packing_format_for_cpu", False):
        return
    convert = getattr(sys.modules.get(type(state).__module__), _CONVERT, None)
    if getattr(layer, "support_avx512bf16_for_cpu", False) and convert is not None:
        layer.weight.data, layer.weight.quant_state = convert(layer.weight.data, state)


def _in_8_bits(stored: Mapping[str, FileTensor], name: str) -> bool:
    return name in stored and stored[name].dtype is torch.int8


def _check_4bit(
    stored: Mapping[str, FileTensor], weight: str, form: str, tensor: FileTensor, shape: tuple[int, ...] | None
) -> None:
    state = _state(tensor)
    if form not in _FORMS or state["quant_type"] != form:
        raise _wrong(tensor, f"quant_type is {state['quant_type']!r}; it is one of {_FORMS} and in the tensor's name")
    nested = not _NESTED_KEYS.isdisjoint(state)
    for key in ("blocksize", "nested_blocksize") if nested else ("blocksize",):
        if type(state[key]) is not int or state[key] not in _BLOCKS:
            raise _wrong(tensor, f"{key} is {state[key]!r}; bitsandbytes has kernels for {_BLOCKS}")
    if state["dtype"] not in _DTYPES:
        raise _wrong(tensor, f"dtype is {state['dtype']!r}; it is one of {_DTYPES}")
    if nested and (state["nested_dtype"] != "float32" or not _is_float32(state["nested_offset"])):
        written = f"nested_offset is {state['nested_offset']!r} of {state['nested_dtype']!r}"
        raise _wrong(tensor, f"{written}; it is a number of float32")
    given = state["shape"]
    if not isinstance(given, list) or not all(type(size) is int and size > 0 for size in given):
        raise _wrong(tensor, f"shape is {given!r}, which is none")
    if shape is not None and tuple(given) not in (shape, shape[::-1]):
        raise _wrong(tensor, f"shape is {given}, the model's config.json makes it {list(shape)}")
    numbers = math.prod(given)
    scales = -(-numbers // state["blocksize"])
    _part(stored, tensor, weight, -(-numbers // 2), None)
    _part(stored, tensor, f"{weight}.quant_map", _CODE * 4, torch.float32)
    if not nested:
        _part(stored, tensor, f"{weight}.absmax", scales * 4, torch.float32)
        for name in (f"{weight}.nested_absmax", f"{weight}.nested_quant_map"):
            if name in stored:
                raise _wrong(stored[name], f"is one too many: {tensor.name} says that scales are not packed")
        return
    _part(stored, tensor, f"{weight}.absmax", scales, torch.uint8)
    _part(stored, tensor, f"{weight}.nested_absmax", -(-scales // state["nested_blocksize"]) * 4, torch.float32)
    _part(stored, tensor, f"{weight}.nested_quant_map", _NESTED_CODE * 4, torch.float32)


def _state(tensor: FileTensor) -> dict[str, Any]:
    """The content of a quant_state, with exactly the keys that there are, each once."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("it has a key twice")
        return dict(pairs)

    if tensor.dtype is not torch.uint8:
        raise _wrong(tensor, f"has data type {tensor.dtype}; it is JSON in bytes of uint8")
    try:
        state = json.loads(bytes(tensor.read().tolist()).decode("ascii"), object_pairs_hook=once)
    except ValueError as error:
        raise _wrong(tensor, f"is no JSON ({error})") from error
    if not isinstance(state, dict) or set(state) not in (_PLAIN_KEYS, _PLAIN_KEYS | _NESTED_KEYS):
        keys = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise _wrong(tensor, f"has {keys}; it has {sorted(_PLAIN_KEYS)}, and {sorted(_NESTED_KEYS)} or none of these")
    return state


def _is_float32(value: Any) -> bool:
    """Whether a float32 was written as ``value``: a digit that changed makes it a number that needs more bits."""
    if type(value) is not float or not math.isfinite(value):
        return False
    try:
        return bool(torch.tensor(value, dtype=torch.float32).item() == value)
    except RuntimeError:
        return False


def _part(
    stored: Mapping[str, FileTensor], state: FileTensor, name: str, nbytes: int, dtype: torch.dtype | None
) -> None:
    if name not in stored:
        raise _wrong(state, f"{name} is missing in the checkpoint")
    tensor = stored[name]
    if tensor.nbytes != nbytes or dtype not in (None, tensor.dtype):
        wanted = f"{nbytes} bytes" + ("" if dtype is None else f" of {dtype}")
        raise _wrong(tensor, f"has {tensor.nbytes} bytes of {tensor.dtype}, {state.name} makes them {wanted}")


def _check_unpacked_or_8bit(stored: Mapping[str, FileTensor], name: str, shape: tuple[int, ...] | None) -> None:
    tensor = stored[name]
    if tensor.dtype is torch.int8:
        scales = stored.get(f"{name.removesuffix('.weight')}.SCB")
        if scales is None:
            raise _wrong(tensor, f"has 8 bits, and {name.removesuffix('.weight')}.SCB is missing in the checkpoint")
        if scales.shape != tensor.shape[:1] or scales.dtype is not torch.float32:
            found = f"has shape {list(scales.shape)} of {scales.dtype}"
            raise _wrong(scales, f"{found}, {name} makes it {list(tensor.shape[:1])} of float32")
        written = stored.get(f"{name}_format")
        if written is not None and (written.nbytes != 1 or written.read().item() != 0):
            raise _wrong(written, "is not 0: bitsandbytes reads weights in rows alone; save the checkpoint again")
    elif shape is not None and not tensor.dtype.is_floating_point:
        raise _wrong(tensor, f"is packed ({tensor.dtype}), and its quant_state is missing in the checkpoint")
    if shape is not None and tensor.shape not in (shape, shape[::-1]):
        raise _wrong(tensor, f"has shape {list(tensor.shape)}, the model's config.json makes it {list(shape)}")


def _packed_weights(model: torch.nn.Module) -> Iterator[tuple[str, Any, Any]]:
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            packing = _is_a(module, _LAYERS) and name == "weight"
            if packing or (_is_a(parameter, _PACKED) and hasattr(module, "out_features")):
                yield f"{path}.{name}", module, parameter


def _wrong(tensor: FileTensor, what: str) -> ConfigError:
    return ConfigError(f"{tensor.file}: tensor {tensor.name}: {what}; download the checkpoint again")


def _four_bit_parts(weight: PackedWeight) -> tuple[PackedPart, ...]:
    count = weight.rows * weight.columns
    blocks = -(-count // _BLOCK)
    numbers = PackedPart("", "uint8", (-(-count // 2), 1))
    table = PackedPart(".code", "float32", (_CODE,), is_read=False)
    if not weight.form.nested:
        return (numbers, PackedPart(".absmax", "float32", (blocks,)), table)
    return (
        numbers,
        PackedPart(".absmax", "uint8", (blocks,)),
        PackedPart(".state2.absmax", "float32", (-(-blocks // _NESTED_BLOCK),)),
        PackedPart(".state2.code", "float32", (_NESTED_CODE,)),
        PackedPart(".offset", "float32", ()),
        table,
    )


def _four_bit_calls(weight: PackedWeight) -> Iterator[DequantiseCall]:
    numbers, absmax, *nested = _four_bit_parts(weight)
    scales, name = dense("float32", *absmax.shape), ".absmax"
    if weight.form.nested:
        specs = [TensorArg(k, part.spec) for k, part in enumerate((absmax, *nested[:2]))]
        yield DequantiseCall(
            "bitsandbytes::dequantize_blockwise",
            "default",
            (".absmax", ".state2.absmax", ".state2.code"),
            (*specs, _NESTED_BLOCK, EnumArg("dtype", "float32")),
            scales,
        )
        args = (TensorArg(0, scales), TensorArg(1, nested[2].spec), 1)
        yield DequantiseCall("aten::add_", "Tensor", ("=", ".offset"), args, scales, in_place=True)
        name = "="
    quant_type, shape = weight.form.value.partition("-")[0], (weight.rows, weight.columns)
    yield DequantiseCall(
        "bitsandbytes::dequantize_4bit",
        "default",
        ("", name),
        (
            *(TensorArg(0, numbers.spec), TensorArg(1, scales)),
            *(_BLOCK, quant_type, shape, EnumArg("dtype", weight.dtype)),
        ),
        weight.dequantised,
    )


def _int8_parts(weight: PackedWeight) -> tuple[PackedPart, ...]:
    scales = PackedPart(".SCB", "float32", (weight.rows,))
    return (PackedPart("", "int8", (weight.rows, weight.columns)), scales)


def _int8_calls(weight: PackedWeight) -> Iterator[DequantiseCall]:
    made = weight.dequantised
    yield cast_call("", _int8_parts(weight)[0].spec, made)
    args = (TensorArg(0, made), TensorArg(1, dense("float32", weight.rows, 1)))
    yield DequantiseCall("aten::mul_", "Tensor", ("=", ".SCB"), args, made, in_place=True)


def _four_bits(form: PackedForm) -> StoredForm:
    quant_type = form.value.partition("-")[0]
    asked = {"load_in_4bit": True, "bnb_4bit_quant_type": quant_type, "bnb_4bit_use_double_quant": form.nested}
    product = "bitsandbytes::gemm_4bit"
    return StoredForm(_four_bit_parts, _four_bit_calls, product, asked, dtype_key="bnb_4bit_compute_dtype")


BITSANDBYTES = _Bitsandbytes(
    name="bitsandbytes",
    package="bitsandbytes",
    quant_method="bitsandbytes",
    module="bitsandbytes",
    old_keys=("load_in_4bit", "load_in_8bit"),
    config_defaults={"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False},
    packed_parameters=_PACKED,
    states=frozenset(("QuantState", "MatmulLtState")),
    own_states=frozenset(("state",)),
    rewritten={"MatmulLtState": frozenset(("idx", "is_training"))},
    forms={
        **{form: _four_bits(form) for form in PackedForm if form.in_four_bits},
        PackedForm.INT8: StoredForm(
            _int8_parts, _int8_calls, "bitsandbytes::int8_scaled_mm", asked_by={"load_in_8bit": True}
        ),
    },
)
