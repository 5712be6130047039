"""Models that no batch can be planned for, refused before the first step; and remedies where a capture fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from disco_accel.capture.parts import has_rule, lost_scales
from disco_accel.errors import CaptureError, ConfigError
from disco_accel.quantised.libraries import library_names

_PLAIN_WEIGHTS = (
    "load the model without quantization_config, with dtype=torch.bfloat16: memory_budget then decides how many of its "
    "weights are on the device at a time"
)


def require_known_weights(model: torch.nn.Module) -> None:
    """Raises ConfigError for quantised weights whose tensors are not known, whose scales are gone, or through which no
    gradient goes, and for weights that Accelerate moves."""
    for name, parameter in model.named_parameters():
        if not has_rule(parameter):
            raise ConfigError(
                f"{name}: a {type(parameter).__name__} cannot be planned, because it is not known which tensors it is "
                f"made of; {_PLAIN_WEIGHTS}; or take {library_names()}"
            )
    _require_scales(model, ConfigError)
    for name, module in model.named_modules():
        quantizer = getattr(module, "hf_quantizer", None)
        if quantizer is not None and not _is_trainable(quantizer):
            raise ConfigError(
                f"{name or 'the model'}: was loaded through {type(quantizer).__name__}, whose weights pass no gradient "
                "on, as transformers says; load it with dequantize=True in its quantization_config where that has such "
                f"a key (MXFP4, FP8), or {_PLAIN_WEIGHTS}"
            )
        if getattr(getattr(module, "_hf_hook", None), "offload", False):
            raise ConfigError(
                f"{name or 'the model'}: Accelerate's offloading moves these weights at each forward; plans stand in "
                "for it: load the model without device_map, or call accelerate.hooks.remove_hook_from_submodules(model)"
            )


def require_scales(model: torch.nn.Module) -> None:
    """Raises CaptureError for a quantised weight whose scales are gone since ``prepare``."""
    _require_scales(model, CaptureError)


def _require_scales(model: torch.nn.Module, error: type[ConfigError | CaptureError]) -> None:
    for name, weight, lost, is_packed in lost_scales(model):
        kind = type(weight).__name__
        if not is_packed:
            raise error(f"{name}: this {kind} is not packed yet and has no {lost}; its layer's .to('cpu') packs it")
        raise error(
            f"{name}: this {kind} has no {lost}, which says how its packed bytes are read, and its layer has none; "
            f"assign the {lost} that it had, or load the model again"
        )


def _is_trainable(quantizer: Any) -> bool:
    """Whether the weights of transformers' ``quantizer`` are plain by now, or gradients go through them."""
    dequantised = getattr(getattr(quantizer, "quantization_config", None), "dequantize", False)
    return bool(dequantised) or bool(getattr(quantizer, "is_trainable", True))


def require_own_weights(model: torch.nn.Module) -> None:
    """Raises CaptureError for modules that put another weight in the place of one each time they run."""
    for name, module in model.named_modules():
        if hasattr(module, "merged_adapters") and type(module).__name__ == "MultiheadAttention":
            raise CaptureError(
                f"{name}: PEFT adds this adapter to attention's own weight and subtracts it again at each forward, "
                "which leaves other bits each time; leave torch.nn.MultiheadAttention out of target_modules"
            )


def require_live_adapter(model: torch.nn.Module) -> None:
    """Raises CaptureError if all that can be trained is in adapters that are merged or disabled."""
    tuners: list[Any] = [m for m in model.modules() if hasattr(m, "merged_adapters") and hasattr(m, "active_adapters")]
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    if not tuners or trainable - {id(p) for tuner in tuners for p in tuner.parameters()}:
        return
    if all(getattr(tuner, "disable_adapters", False) for tuner in tuners):
        how, remedy = "disabled", "train outside disable_adapter(), or use torch.no_grad() for a reference pass"
    elif all(tuner.merged_adapters for tuner in tuners):
        how, remedy = "merged into the base", "call unmerge_adapter() before training goes on"
    else:
        return
    raise CaptureError(f"the adapter is {how}, so no trainable parameter reaches the loss; {remedy}")


def require_plain_autograd() -> None:
    """Raises CaptureError under transforms and modes of PyTorch's that look into a backward op by op."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise CaptureError(
            "torch.func: a planned step is one op, which grad, vmap, jacrev and their kin cannot transform; transform "
            "the model before prepare() or after restore(model), or set on_unsupported: eager"
        )
    if torch.is_anomaly_enabled():
        raise CaptureError(
            "detect_anomaly: names the op whose gradient is NaN, and to autograd a planned step is one op; look for it "
            "with on_unsupported: eager, which runs such steps without a plan, or after restore(model)"
        )


def require_fixed_forward(model: torch.nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Raises CaptureError for models that choose the kernels of a training step at random, in Python."""
    own_drop = any("layerdrop" in vars(m) for m in model.modules())
    for name, module in model.named_modules():
        if not module.training:
            continue
        config = getattr(module, "config", None)
        drop = vars(module).get("layerdrop", 0.0 if own_drop else getattr(config, "layerdrop", 0.0))
        if isinstance(drop, (int, float)) and drop > 0:
            raise CaptureError(
                f"layerdrop: {drop} in {name or 'the model'} leaves out layers at random, others at each step; set it "
                "to 0 there (in the config, and in each module that has it as an attribute) to train from a plan"
            )
        if _augments(module, config) and kwargs.get("mask_time_indices") is None:
            raise CaptureError(
                f"apply_spec_augment: {name or 'the model'} hides other parts of its input at each step, chosen by "
                "numpy; set model.config.apply_spec_augment = False, or augment the batch before the model gets it"
            )
        if isinstance(getattr(module, "module_dropout", None), Mapping) and hasattr(module, "merged_adapters"):
            raise CaptureError(
                f"{name}: {type(module).__module__.split('.')[-2]} adapters draw a number at each step, even with "
                "module_dropout: 0, and leave themselves out by it; use LoraConfig to train from a plan, or set "
                "on_unsupported: eager"
            )


def _augments(module: torch.nn.Module, config: Any) -> bool:
    masks = hasattr(module, "_mask_input_features") or hasattr(module, "_mask_hidden_states")
    if not masks or not getattr(config, "apply_spec_augment", False):
        return False
    return any((getattr(config, name, 0.0) or 0.0) > 0 for name in ("mask_time_prob", "mask_feature_prob"))


_EAGER = "set on_unsupported: eager to train it without a plan"


def advised(model: torch.nn.Module, error: CaptureError) -> CaptureError:
    """``error`` with the way out for this kind of model, if there is a known one."""
    text = str(error)
    for applies, remedy in _REMEDIES:
        if applies(text, model):
            return CaptureError(f"{text}: {remedy}")
    return error


def _in_text(pattern: str) -> Callable[[str, torch.nn.Module], bool]:
    return lambda text, _: re.search(pattern, text) is not None


def _configs(model: torch.nn.Module) -> Iterator[Any]:
    return (c for m in model.modules() if (c := getattr(m, "config", None)) is not None)


def _sees_images(text: str, model: torch.nn.Module) -> bool:
    by_value = "depends on the data" in text or "masked_scatter" in text
    return by_value and any(getattr(c, "vision_config", None) is not None for c in _configs(model))


_REMEDIES: list[tuple[Callable[[str, torch.nn.Module], bool], str]] = [
    (
        _in_text(r"\(modeling_deberta.*label_index"),
        "the loss picks rows by the labels' values; set model.config.problem_type to 'single_label_classification' "
        "(or 'regression') before prepare()",
    ),
    (
        _in_text(r"\(modeling_.*labels\.max\(\)"),
        "the model looks at the labels before its CTC loss; leave labels out and compute the loss from logits with "
        f"torch.nn.functional.ctc_loss, or {_EAGER}",
    ),
    (
        _in_text(r"flex_attention|BlockMask|create_block_mask"),
        'flex attention builds its mask from values; load the model with attn_implementation="sdpa"',
    ),
    (
        _in_text(r"Cannot access data pointer"),
        "a kernel that is no op of PyTorch's, of Triton or an extension, leaves no trace in a capture; register it "
        f"with torch.library.custom_op, with a fake and an autograd formula, or {_EAGER}",
    ),
    (
        _in_text(r"lazily conjugated|complex"),
        f"plans hold no complex numbers, by which this model's rotary embedding turns (as Llama 4's does); {_EAGER}",
    ),
    (
        _sees_images,
        "where images stand among the tokens, and of which size, is read from the batch's values, which no plan can "
        f"know; {_EAGER}, or train on batches of text alone, without pixel_values",
    ),
]
