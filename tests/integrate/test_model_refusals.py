"""What cannot be right is refused or told before it can do harm, with what to do about it."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._pytree import tree_map
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from disco_accel import DiscoConfig, prepare, restore, stats
from disco_accel.errors import CaptureError, ConfigError
from disco_accel.step.run.pending import externals_of
from disco_accel.step.run.session import current_step, find_state
from tests.integrate.twins import SMALL, assert_same, assert_same_step, batch, config, pair, step
from tests.support.models import tiny_lora

UP = "base_model.model.model.layers.0.mlp.up_proj.base_layer"


class PackedParameter(torch.nn.Parameter):
    """Of a library that nobody here knows: packed bytes, with scales wherever it keeps them."""


class InParts(torch.Tensor):
    """The sum of two tensors, as torchao writes such classes."""

    @staticmethod
    def __new__(cls, high: torch.Tensor, low: torch.Tensor) -> InParts:
        return torch.Tensor._make_wrapper_subclass(cls, high.shape, dtype=high.dtype)

    def __init__(self, high: torch.Tensor, low: torch.Tensor) -> None:
        self.high, self.low = high, low

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["high", "low"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], _: Any, size: Any, stride: Any) -> InParts:
        return InParts(parts["high"], parts["low"])

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten.detach.default:
            return InParts(args[0].high.detach(), args[0].low.detach())
        args, kwargs = tree_map(lambda x: x.high + x.low if isinstance(x, InParts) else x, (args, kwargs or {}))
        return op(*args, **kwargs)


def _quantised() -> Any:
    model = tiny_lora(**SMALL)
    weight = torch.zeros(64, 32, dtype=torch.int8)
    model.get_submodule(UP).weight = torch.Tensor._make_subclass(PackedParameter, weight, False)
    return model


def test_weights_without_a_rule_are_refused_before_any_of_them_moves() -> None:
    """The message has the tensor, its class, and what would work."""
    model = _quantised()
    places = {n: p.data_ptr() for n, p in model.named_parameters()}
    with pytest.raises(ConfigError, match=r"up_proj.base_layer.weight: a PackedParameter .*; or take bitsandbytes"):
        prepare(model, config())
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == places and stats(model) == {}


def test_with_on_unsupported_eager_a_quantised_model_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = _quantised()
    forward = model.forward
    assert prepare(model, config(on_unsupported="eager")) is model
    assert model.forward == forward and stats(model) == {}
    assert "left as it is" in caplog.text


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4", "fbgemm_fp8"])
def test_forms_that_transformers_calls_untrainable_are_refused(form: str) -> None:
    """By the name of their quantizer; dequantised on loading their weights are plain."""
    if form not in AUTO_QUANTIZER_MAPPING:
        pytest.skip(f"this transformers has no {form}")
    kind: Any = AUTO_QUANTIZER_MAPPING[form]
    settings: Any = AUTO_QUANTIZATION_CONFIG_MAPPING[form]()
    model: Any = tiny_lora(**SMALL)
    base = model.get_base_model()
    base.hf_quantizer = kind(settings)
    with pytest.raises(ConfigError, match=rf"the model: was loaded through {kind.__name__}, .*dequantize=True"):
        prepare(model, config())
    if hasattr(settings, "dequantize"):
        settings.dequantize = True
        assert_same_step(prepare(model, config()), tiny_lora(**SMALL))


def test_a_quantised_weight_that_is_to_be_trained_is_refused() -> None:
    """Frozen, the same weight is two clean inputs of the plan, under the names of its parts."""
    models = [tiny_lora(**SMALL) for _ in range(2)]
    for model in models:
        layer = model.get_submodule(UP)
        weight = layer.weight.detach()
        layer.weight = torch.nn.Parameter(InParts(weight, weight / 4))
    planned, eager = prepare(models[0], config()), models[1]
    with pytest.raises(CaptureError, match=rf"{UP}.weight: a InParts cannot be trained under a plan; freeze it"):
        planned(**batch())
    for model in models:
        model.get_parameter(f"{UP}.weight").requires_grad_(False)
    assert_same_step(planned, eager)
    made = current_step(planned)
    assert made is not None and {f"{UP}.weight.high", f"{UP}.weight.low"} <= {b.name for b in made.captured.bindings}


@pytest.mark.parametrize("how", ["merged", "disabled"])
def test_training_an_adapter_that_is_not_there_says_what_to_do(how: str) -> None:
    model, eager = pair()
    assert_same_step(model, eager)
    if how == "merged":
        model.merge_adapter()
        with pytest.raises(CaptureError, match=r"merged into the base.*unmerge_adapter\(\)"):
            model(**batch())
        model.unmerge_adapter()
        eager.merge_adapter()
        eager.unmerge_adapter()
    else:
        with model.disable_adapter(), pytest.raises(CaptureError, match=r"disabled.*outside disable_adapter\(\)"):
            model(**batch())
    assert_same_step(model, eager, 1)


def test_parameters_without_a_gradient_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """A layer that the forward skips trains nothing, in eager neither: the user learns which, and the rest is right."""
    models = []
    for _ in range(2):
        model: Any = tiny_lora(layers=2, hidden=32, vocabulary=32)
        model.get_base_model().model.config.num_hidden_layers = 1
        models.append(model)
    planned, eager = prepare(models[0], config()), models[1]
    for seed in range(3):
        assert_same(step(planned, seed), step(eager, seed))
    told = [r.getMessage() for r in caplog.records if "get no gradient" in r.getMessage()]
    assert len(told) == 1 and told[0].startswith("14 of 28 trainable parameters")
    assert len(stats(planned)["without_gradient"]) == 14 and "layers.1" in stats(planned)["without_gradient"][0]


def test_a_gradient_without_its_parameter_is_an_error() -> None:
    """The check itself can fail: a plan whose parameter has gone is refused, not trained without."""
    model, _ = pair()
    model(**batch()).loss.backward()
    planned, state = current_step(model), find_state(model)
    assert planned is not None and state is not None
    planned.parameters = None
    next(p for p in model.parameters() if p.requires_grad).requires_grad_(False)
    with pytest.raises(Exception, match="has no parameter to go to"):
        externals_of(state, model, planned, batch())


def test_a_backward_inside_autocast_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = pair()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            model(**batch()).loss.backward()
    assert sum("inside autocast" in r.getMessage() for r in caplog.records) == 1
    assert sum("inside autocast" in r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING) == 1


@pytest.mark.parametrize("change", ["half", "bfloat16", "double"])
def test_converting_a_prepared_model_is_right_or_refused(change: str) -> None:
    """On the host device the weights leave the arena, which the next step refuses; restore and prepare train on."""
    model, eager = pair()
    assert_same_step(model, eager)
    getattr(model, change)()
    getattr(eager, change)()
    try:
        got = step(model, 1)
    except ConfigError as error:
        assert "restore(model)" in str(error)
        prepare(restore(model), config())
        got = step(model, 1)
    assert_same(got, step(eager, 1))
    assert_same_step(model, eager, 2)


def test_the_base_of_a_peft_model_can_be_prepared_and_trained_through_its_wrapper() -> None:
    """``get_base_model()``: whoever holds the wrapper runs the base's planned step."""
    model, eager = tiny_lora(**SMALL), tiny_lora(**SMALL)
    base: Any = model.get_base_model()  # type: ignore[operator]
    prepare(base, config())
    assert_same_step(model, eager)
    assert_same_step(model, eager, 1)
    assert stats(base)["steps_compiled"] == 2 and model.get_base_model() is base  # type: ignore[operator]


def test_the_base_of_a_prepared_model_still_evaluates_and_trains() -> None:
    """Called itself it is the model's own, adapter included: nothing is planned, nothing wrong."""
    model, eager = pair()
    assert_same_step(model, eager)
    bases: list[Any] = [m.get_base_model() for m in (model, eager)]  # type: ignore[operator]
    with torch.no_grad():
        assert torch.equal(bases[0](**batch()).logits, bases[1](**batch()).logits)
    assert_same(step(bases[0], 1), step(bases[1], 1))
    assert_same_step(model, eager, 2)


def test_a_deep_copy_and_its_original_train_apart() -> None:
    """A reference model made with deepcopy stays as it was while the original trains, and can be prepared itself."""
    model, eager = pair()
    assert_same_step(model, eager)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for m in (model, eager):
            for parameter in m.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.25)
    untouched = tiny_lora(**SMALL)
    assert_same_step(prepare(twin, config()), untouched, 1)
    assert_same_step(model, eager, 1)


def test_two_adapters_of_which_one_trains() -> None:
    """The other one's parameters are frozen by PEFT: no gradient, no word about it."""
    base = tiny_lora(**SMALL).unload()  # type: ignore[operator]
    model: Any = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    model.set_adapter("other")
    eager = copy.deepcopy(model)
    prepare(model, DiscoConfig(memory_budget="1GiB", device="cpu"))
    assert_same_step(model, eager)
    assert stats(model)["without_gradient"] == []
