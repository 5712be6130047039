"""What people change on a Hugging Face model with an adapter between steps: it trains as its eager twin, to the bit."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.llama import modeling_llama

from disco_accel import prepare, stats
from disco_accel.errors import CaptureError
from tests.integrate.twins import SMALL, assert_same, batch, config, step
from tests.support.models import tiny_lora


def _inner(model: Any) -> Any:
    return model.base_model.model


def _halved_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(*args, **kwargs) / 2


def _other_rotation(q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any, **_: Any) -> Any:
    return q * cos.unsqueeze(1), k * cos.unsqueeze(1)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "variance_epsilon": lambda m: setattr(_inner(m).model.norm, "variance_epsilon", 0.5),
    "scaling of attention": lambda m: setattr(_inner(m).model.layers[0].self_attn, "scaling", 0.9),
    "attention_scaling of rotary": lambda m: setattr(_inner(m).model.rotary_emb, "attention_scaling", 1.5),
    "scaling of an adapter": lambda m: _inner(m).model.layers[0].mlp.up_proj.scaling.update(default=3.0),
    "loss_function": lambda m: setattr(_inner(m), "loss_function", _halved_loss),
    "num_hidden_layers": lambda m: setattr(_inner(m).config, "num_hidden_layers", 1),
    "function of transformers": lambda m: setattr(modeling_llama, "apply_rotary_pos_emb", _other_rotation),
    "method of a class": lambda m: setattr(modeling_llama.LlamaRMSNorm, "forward", lambda self, x: x * self.weight),
    "sdpa_kernel": lambda m: UNDO.enter_context(sdpa_kernel(SDPBackend.MATH)),
    "switch of attention kernels": lambda m: torch.backends.cuda.enable_flash_sdp(False),
}
UNDO = contextlib.ExitStack()


@contextlib.contextmanager
def _undone() -> Any:
    rotation, norm = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaRMSNorm.forward
    try:
        yield
    finally:
        modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaRMSNorm.forward = rotation, norm
        UNDO.close()
        torch.backends.cuda.enable_flash_sdp(True)


def _three_steps(change: Callable[[Any], Any], planned: bool) -> tuple[Any, list[Any]]:
    with _undone():
        model: Any = tiny_lora(**SMALL | {"layers": 2})
        if planned:
            prepare(model, config())
        results = [step(model, 0)]
        change(model)
        return model, [*results, *(step(model, seed) for seed in (1, 2))]


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_between_steps_is_followed(kind: str) -> None:
    _, expected = _three_steps(CHANGES[kind], False)
    model, planned = _three_steps(CHANGES[kind], True)
    for got, wanted in zip(planned, expected, strict=True):
        assert_same(got, wanted)
    counts = stats(model)
    assert (counts["steps_compiled"], counts["steps_eager"], counts["plans"]) == (3, 0, 2)


def test_bookkeeping_of_libraries_needs_no_other_plan() -> None:
    """Attributes that no forward reads: Trainer and PEFT set some while they train."""
    model: Any = prepare(tiny_lora(**SMALL), config())
    for seed in range(3):
        step(model, seed)
        _inner(model).warnings_issued = {"estimate_tokens": seed}
        model.some_attribute_of_a_user = object()
        _inner(model).model.layers[0].mlp.note = [seed]
    assert stats(model)["plans"] == 1


def test_an_embedding_that_begins_to_write_to_its_weight_is_refused() -> None:
    """max_norm scales rows of a frozen weight in place at each forward."""
    model: Any = prepare(tiny_lora(**SMALL), config())
    step(model, 0)
    _inner(model).model.embed_tokens.max_norm = 0.01
    with pytest.raises(CaptureError, match=r"embed_tokens changes an input of the step \(frozen\) in place"):
        step(model, 1)


def test_rotary_embeddings_that_change_with_the_length_are_refused() -> None:
    """They look at positions, and put another buffer in place; shorter batches then depend on earlier ones."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_lora(**SMALL, max_position_embeddings=4, rope_parameters=rope)
    with pytest.raises(CaptureError, match=r"rotary_emb .*depends on the data"):
        step(prepare(model, config()), 0)


class _Seeing(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["function mode", "dispatch mode", "anomaly"])
def test_modes_that_see_every_op_are_refused_by_name(mode: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = prepare(tiny_lora(**SMALL), config())
    step(model, 0)
    modes = {
        "function mode": _Seeing,
        "dispatch mode": functools.partial(FlopCounterMode, display=False),
        "anomaly": torch.autograd.detect_anomaly,
    }
    with modes[mode](), pytest.raises(CaptureError, match=r"_Seeing|FlopCounterMode|detect_anomaly"):
        model(**batch(1))
    step(model, 2)


def test_checkpointing_that_is_switched_off_and_on_again_is_the_same_state() -> None:
    """As TRL's preference trainers do between forward and backward; transformers adds a hook more each time."""
    eager, planned = tiny_lora(**SMALL, checkpointing=True), prepare(tiny_lora(**SMALL, checkpointing=True), config())
    for seed in range(12):
        results = []
        for model in (planned, eager):
            logits = model(**batch(seed)).logits
            model.gradient_checkpointing_disable()
            model.gradient_checkpointing_enable({"use_reentrant": False})
            logits.float().square().mean().backward()
            results.append(
                (logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad})
            )
            model.zero_grad(set_to_none=True)
        assert_same(*results)
    # The first step is planned for its loss, the others for the logits, whose gradient was asked for.
    assert stats(planned)["plans"] == 2 and stats(planned)["steps_eager"] == 0
