"""Changes that a user may make to a quantised layer, by form of quantisation: in place, by replacement, by loading."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch

from tests.quantised.small import tokens

Change = Callable[[Any], Any]


ATTENTION = "base_model.model.model.layers.0.self_attn"


def _place(model: Any, name: str) -> tuple[Any, str]:
    """The module that holds the quantised layer ``name`` of a small model or of an adapted one, and its name there."""
    return (model, name) if hasattr(model, name) else (model.get_submodule(f"{ATTENTION}.{name}"), "base_layer")


def linear(model: Any) -> Any:
    """A quantised layer of the base."""
    return getattr(*_place(model, "q_proj"))


def _other(model: Any) -> Any:
    """One more, of the same shape and form."""
    return getattr(*_place(model, "o_proj"))


def _experts(model: Any) -> Any:
    return (
        model.experts
        if hasattr(model, "experts")
        else model.get_submodule("base_model.model.model.layers.0.mlp.experts")
    )


def scale(layer: Any) -> Any:
    """The tensor of scales of a layer, wherever its library keeps it."""
    if hasattr(layer, "parametrizations"):
        return layer.parametrizations.gate_up_proj[0].quant_state.absmax
    if hasattr(layer, "meta"):
        return layer.meta["scale"]
    if hasattr(layer, "state"):
        return layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB
    if getattr(layer.weight, "quant_state", None) is not None:
        state = layer.weight.quant_state
        return state.state2.absmax if state.nested else state.absmax
    return layer.weight.scale if hasattr(layer.weight, "scale") else layer.weight._scale


def _packed(layer: Any) -> torch.Tensor:
    """The packed bytes of a layer, as uint8."""
    if hasattr(layer, "parametrizations"):
        return layer.parametrizations.gate_up_proj.original.data.view(torch.uint8)
    if hasattr(layer, "W_q"):
        return layer.W_q.data.view(torch.uint8)
    weight = layer.weight
    while True:
        if not hasattr(weight, "__tensor_flatten__"):
            return weight.data.view(torch.uint8)
        weight = getattr(weight, weight.__tensor_flatten__()[0][0])


@torch.no_grad()
def _scale_in_place(model: Any) -> None:
    scale(linear(model)).data.mul_(1.5)


def _bit(model: Any) -> None:
    _packed(linear(model)).reshape(-1).numpy()[5] ^= 1


def _bit_elsewhere(model: Any) -> None:
    thread = threading.Thread(target=_bit, args=(model,))
    thread.start()
    thread.join()


def _weight_of_other(model: Any) -> None:
    """Another layer's packed weight, as a Parameter of its own."""
    linear(model).weight = copy.deepcopy(_other(model).weight)


def _weight_shared(model: Any) -> None:
    linear(model).weight = _other(model).weight


def _data_of_other(model: Any) -> None:
    linear(model).weight.data = _other(model).weight.data.clone()


def _quant_state(model: Any) -> None:
    state = copy.deepcopy(linear(model).weight.quant_state)
    inner = state.state2 if state.nested else state
    inner.absmax = inner.absmax * 1.5
    linear(model).weight.quant_state = state


def _absmax(model: Any) -> None:
    state = linear(model).weight.quant_state
    inner = state.state2 if state.nested else state
    inner.absmax = inner.absmax * 1.5


def _offset(model: Any) -> None:
    state = linear(model).weight.quant_state
    state.offset = state.offset * 2 + 1


def _code(model: Any) -> None:
    state = linear(model).weight.quant_state
    state.code = state.code.flip(0)


def _quant_type(model: Any) -> None:
    linear(model).weight.quant_state.quant_type = "fp4"


def _blocksize(model: Any) -> None:
    """Twice the size or half of it, with as many scales as that needs."""
    state = linear(model).weight.quant_state
    wide = state.blocksize == 128
    state.blocksize = 64 if wide else 128
    state.absmax = state.absmax.repeat_interleave(2) if wide else state.absmax[::2].clone()


def _module_quant_state(model: Any) -> None:
    """Read only where the weight has none."""
    layer = linear(model)
    layer.quant_state = copy.deepcopy(layer.weight.quant_state)
    layer.quant_state.absmax = layer.quant_state.absmax.flip(0)
    layer.weight.quant_state = None


def _state_lost(model: Any) -> None:
    """The weight's and the layer's: nothing says how the packed bytes are read."""
    layer = linear(model)
    layer.quant_state = layer.weight.quant_state = None


def _plain_parameter(model: Any) -> None:
    """The packed bytes as a Parameter without a state, as FSDP leaves them: the layer has it still."""
    layer = linear(model)
    layer.weight = torch.nn.Parameter(layer.weight.data, requires_grad=False)


def _scb_lost(model: Any) -> None:
    layer = linear(model)
    layer.state.SCB = layer.weight.SCB = None


def _experts_state_lost(model: Any) -> None:
    _experts(model).parametrizations.gate_up_proj[0].quant_state = None


def _float_weight(model: Any) -> None:
    """A plain layer in the place of a quantised one."""
    torch.manual_seed(7)
    plain = torch.nn.Linear(128, 128, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    setattr(*_place(model, "q_proj"), plain)


def _requantised(model: Any) -> None:
    """Plain weights again, then quantised as FP4."""
    from bitsandbytes.nn import Params4bit

    torch.manual_seed(8)
    layer = linear(model)
    data = torch.randn(128, 128, dtype=torch.bfloat16)
    layer.weight = Params4bit(data, requires_grad=False, quant_type="fp4", compress_statistics=False, module=layer).to(
        "cpu"
    )


def _loaded(model: Any) -> None:
    """A state dict with the weights of another layer."""
    state = {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in _other(model).state_dict().items()
    }
    linear(model).load_state_dict(state, strict=False)


def _evaluated(model: Any) -> None:
    """bitsandbytes repacks the weights for some CPUs then."""
    model.eval()
    with torch.no_grad():
        model(**tokens(9))
    model.train()


def _evaluated_bare(model: Any) -> None:
    """The same, of the base alone and below the model's own forward."""
    layer = linear(model)
    layer.eval()
    with torch.no_grad():
        layer(torch.ones(2, 128, dtype=torch.bfloat16))
    layer.train()


def _saved(model: Any) -> None:
    model.state_dict()


def _merged(model: Any) -> None:
    if hasattr(model, "merge_adapter"):
        model.merge_adapter()
        model.unmerge_adapter()


def _state_scb(model: Any) -> None:
    layer = linear(model)
    holder = layer.state if layer.weight.SCB is None else layer.weight
    holder.SCB = holder.SCB * 1.5


def _state_cb(model: Any) -> None:
    layer = linear(model)
    holder = layer.state if layer.weight.CB is None else layer.weight
    holder.CB = holder.CB.roll(1, 0)


def _state_cb_data(model: Any) -> None:
    layer = linear(model)
    holder = layer.state if layer.weight.CB is None else layer.weight
    holder.CB.data = holder.CB.data.roll(1, 0)


def _threshold(model: Any) -> None:
    linear(model).state.threshold = 0.0


def _meta_scale(model: Any) -> None:
    layer = linear(model)
    layer.meta["scale"] = layer.meta["scale"] * 1.5


def _meta(model: Any) -> None:
    layer = linear(model)
    layer.meta = {**layer.meta, "scale": layer.meta["scale"] * 1.5}


def _wq(model: Any) -> None:
    layer = linear(model)
    layer.W_q = torch.nn.Parameter(layer.W_q.data.roll(1, 0), requires_grad=False)


def _wq_data(model: Any) -> None:
    layer = linear(model)
    layer.W_q.data = layer.W_q.data.roll(1, 0)


def _inner(model: Any) -> None:
    weight = linear(model).weight
    name = weight.__tensor_flatten__()[0][0]
    setattr(weight, name, getattr(weight, name).roll(1, 0))


def _inner_scale(model: Any) -> None:
    weight = linear(model).weight
    name = "scale" if hasattr(weight, "scale") else "_scale"
    setattr(weight, name, getattr(weight, name) * 1.5)


def _inner_data(model: Any) -> None:
    weight = linear(model).weight
    name = "scale" if hasattr(weight, "scale") else "_scale"
    part = getattr(weight, name)
    part.data = part.data * 1.5


def _experts_scale(model: Any) -> None:
    scale(_experts(model)).mul_(1.5)


def _experts_absmax(model: Any) -> None:
    state = _experts(model).parametrizations.gate_up_proj[0].quant_state
    state.absmax = state.absmax * 1.5


def _experts_state(model: Any) -> None:
    layer = _experts(model).parametrizations.gate_up_proj[0]
    state = copy.deepcopy(layer.quant_state)
    state.absmax = state.absmax * 1.5
    layer.quant_state = state


def _experts_bit(model: Any) -> None:
    _packed(_experts(model)).reshape(-1).numpy()[5] ^= 1


def _experts_data(model: Any) -> None:
    original = _experts(model).parametrizations.gate_up_proj.original
    original.data = original.data.roll(1, 0)


def _to_cpu(model: Any) -> None:
    model.to("cpu")


def _to_dtype(model: Any) -> None:
    model.to(torch.float32)


def _float(model: Any) -> None:
    model.float()


ANY: dict[str, Change] = {
    "scale in place": _scale_in_place,
    "one bit": _bit,
    "one bit, another thread": _bit_elsewhere,
    "no change": lambda model: None,
    "evaluated": _evaluated,
    "evaluated, one layer": _evaluated_bare,
    "saved": _saved,
    "merged and unmerged": _merged,
    "plain layer instead": _float_weight,
    "to cpu": _to_cpu,
    "to dtype": _to_dtype,
    "float()": _float,
}
WEIGHT: dict[str, Change] = {
    "other Parameter": _weight_of_other,
    "other layer's Parameter": _weight_shared,
    "weight.data": _data_of_other,
    "load_state_dict": _loaded,
}
FOUR_BIT: dict[str, Change] = {
    "quant_state": _quant_state,
    "quant_state.absmax": _absmax,
    "quant_state.code": _code,
    "quant_type": _quant_type,
    "requantised": _requantised,
}
PLAIN_FOUR_BIT: dict[str, Change] = {
    "blocksize": _blocksize,
    "module.quant_state": _module_quant_state,
    "plain Parameter": _plain_parameter,
    "state lost": _state_lost,
}
WRAPPED: dict[str, Change] = {"inner tensor": _inner, "inner scale": _inner_scale, "inner scale.data": _inner_data}
CHANGES: dict[str, dict[str, Change]] = {
    "bitsandbytes NF4": ANY | WEIGHT | FOUR_BIT | PLAIN_FOUR_BIT,
    "bitsandbytes NF4, double": ANY | WEIGHT | FOUR_BIT | {"offset": _offset},
    "bitsandbytes int8": ANY
    | WEIGHT
    | {
        "state.SCB": _state_scb,
        "state.CB": _state_cb,
        "state.CB.data": _state_cb_data,
        "state.threshold": _threshold,
        "state lost": _scb_lost,
    },
    "bitsandbytes NF4 experts": {
        "no change": lambda model: None,
        "scale in place": _experts_scale,
        "quant_state.absmax": _experts_absmax,
        "quant_state": _experts_state,
        "one bit": _experts_bit,
        "original.data": _experts_data,
        "evaluated": _evaluated,
        "state lost": _experts_state_lost,
    },
    "torchao int8": ANY | WEIGHT | WRAPPED,
    "torchao float8": ANY | WEIGHT | WRAPPED,
    "quanto int8": ANY | WEIGHT | WRAPPED,
    "quanto int4": ANY | WEIGHT | {"inner scale": _inner_scale, "inner scale.data": _inner_data},
    "hqq 4 bits": ANY
    | {"meta scale": _meta_scale, "meta": _meta, "W_q": _wq, "W_q.data": _wq_data, "load_state_dict": _loaded},
}
LASTING = frozenset(
    (
        "evaluated",
        "evaluated, one layer",
        "to dtype",
        "float()",
        "merged and unmerged",
        "plain layer instead",
        "other layer's Parameter",
        "plain Parameter",
    )
)
"""Changes after which a layer is of another form: the next change gets models of its own."""
FIRST = frozenset(("module.quant_state", "plain Parameter", "state lost"))
"""Changes that are made before ``prepare``, too."""


def moments(change: str) -> tuple[str, ...]:
    """When ``change`` is made."""
    return ("between steps", "before backward", *(("before prepare",) if change in FIRST else ()))
