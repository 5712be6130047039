"""Models beyond the families that are planned as they are: each trains to eager's bits from a plan for the field that
is differentiated, or is refused with what stops it and what would work, and trains to eager's bits without a plan."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import transformers as hf
from peft import LoHaConfig, LoKrConfig, LoraConfig, get_peft_model

from disco_accel import prepare, restore, stats
from disco_accel.errors import CaptureError
from tests.integrate.twins import SMALL, assert_same_step, batch, config
from tests.support.models import tiny_lora

Case = tuple[torch.nn.Module, dict[str, Any]]
_HEADS = {"num_hidden_layers": 1, "num_attention_heads": 4}
_TEXT = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 96, "max_position_embeddings": 64, **_HEADS}
_IMAGE = {"hidden_size": 32, "intermediate_size": 64, "image_size": 16, "patch_size": 8, **_HEADS}
_LLAMA = {**_TEXT, "num_key_value_heads": 2}
_ATTENTION = ["q_proj", "v_proj"]


def adapted(model: torch.nn.Module, targets: Any = None, kind: Any = LoraConfig) -> torch.nn.Module:
    torch.manual_seed(1)
    keys = {"init_lora_weights": False} if kind is LoraConfig else {"init_weights": False}
    found: torch.nn.Module = get_peft_model(model, kind(r=2, target_modules=targets or _ATTENTION, **keys)).train()
    return found


def ids(length: int = 8) -> torch.Tensor:
    return torch.randint(5, 60, (2, length), generator=torch.Generator().manual_seed(0))


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def llama(kind: Any = LoraConfig) -> Case:
    return adapted(hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA)), kind=kind), {"input_ids": ids(), "labels": ids()}


def headless_llama() -> Case:
    return adapted(hf.LlamaModel(hf.LlamaConfig(**_LLAMA))), {"input_ids": ids()}


def bert() -> Case:
    return adapted(hf.BertModel(hf.BertConfig(**_TEXT)), ["query", "value"]), {"input_ids": ids()}


def clip(**arguments: Any) -> Case:
    sizes = {"text_config": {**_TEXT, "eos_token_id": 1}, "vision_config": _IMAGE, "projection_dim": 16}
    given = {"input_ids": ids(), "pixel_values": noise(2, 3, 16, 16)}
    return adapted(hf.CLIPModel(hf.CLIPConfig(**sizes))), given | arguments


def clip_images() -> Case:
    model = hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig(**_IMAGE, projection_dim=16))
    return adapted(model), {"pixel_values": noise(2, 3, 16, 16)}


def llava() -> Case:
    text, image = hf.LlamaConfig(**_LLAMA), hf.CLIPVisionConfig(**{**_IMAGE, "num_hidden_layers": 2})
    sizes = {"text_config": text, "vision_config": image, "image_token_index": 3, "image_seq_length": 4}
    tokens = ids(12).index_fill(1, torch.arange(1, 5), 3)
    model = adapted(hf.LlavaForConditionalGeneration(hf.LlavaConfig(**sizes)), r".*language_model.*(q_proj|v_proj)")
    return model, {"input_ids": tokens, "labels": tokens, "pixel_values": noise(2, 3, 16, 16)}


def qwen2_vl() -> Case:
    image = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}
    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    tokens = {"image_token_id": 3, "vision_start_token_id": 4, "video_token_id": 2, "vision_end_token_id": 1}
    text = {**_LLAMA, "rope_scaling": rope, "bos_token_id": 0, "eos_token_id": 1}
    settings = hf.Qwen2VLConfig(text_config=text, vision_config={**image, "spatial_merge_size": 2}, **tokens)
    model = adapted(hf.Qwen2VLForConditionalGeneration(settings), r".*language_model.*(q_proj|v_proj)")
    given = ids(12)
    given[:, 1], given[:, 2] = 4, 3
    images = {"pixel_values": noise(8, 96), "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 2]])}
    return model, {"input_ids": given, "labels": given, "mm_token_type_ids": (given == 3).long(), **images}


def deberta(problem_type: str | None = None) -> Case:
    sizes = {**_TEXT, "relative_attention": True, "pos_att_type": ["c2p"], "position_buckets": 8, "type_vocab_size": 0}
    model = hf.DebertaV2ForSequenceClassification(hf.DebertaV2Config(**sizes, num_labels=2, problem_type=problem_type))
    return adapted(model, ["query_proj", "value_proj"]), {"input_ids": ids(), "labels": torch.tensor([0, 1])}


def wav2vec2(labels: bool = True, **settings: Any) -> Case:
    convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    sizes = {**_TEXT, **convolutions, "vocab_size": 20, "num_conv_pos_embeddings": 4, "layerdrop": 0.0}
    sizes |= {"num_conv_pos_embedding_groups": 2, "apply_spec_augment": False}
    model = adapted(hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**sizes | settings)))
    return model, {"input_values": noise(2, 400), **({"labels": ids(4) % 19 + 1} if labels else {})}


def opt_with_layerdrop() -> Case:
    sizes = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 96}
    settings = hf.OPTConfig(**sizes, word_embed_proj_dim=32, max_position_embeddings=64, layerdrop=0.5)
    return adapted(hf.OPTForCausalLM(settings)), {"input_ids": ids(), "labels": ids()}


def llama4() -> Case:
    sizes = {**_LLAMA, "intermediate_size_mlp": 64, "head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 4}
    settings = hf.Llama4TextConfig(**sizes, num_experts_per_tok=1, pad_token_id=0)
    return adapted(hf.Llama4ForCausalLM(settings)), {"input_ids": ids(), "labels": ids()}


def whisper(augment: bool) -> Case:
    sides = [f"{side}_{name}" for side in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")]
    sizes = dict(zip(sides, (1, 4, 64) * 2, strict=True)) | {"vocab_size": 96, "d_model": 32, "num_mel_bins": 8}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    settings = hf.WhisperConfig(
        **sizes, **tokens, max_source_positions=20, max_target_positions=20, apply_spec_augment=augment
    )
    return adapted(hf.WhisperForConditionalGeneration(settings)), {"input_features": noise(2, 8, 40), "labels": ids()}


PLANNED: dict[str, tuple[Callable[[], Case], str]] = {
    "LlamaModel": (headless_llama, "last_hidden_state"),
    "BERT, states": (bert, "last_hidden_state"),
    "BERT, pooled": (bert, "pooler_output"),
    "CLIP, own loss": (lambda: clip(return_loss=True), "loss"),
    "CLIP, logits": (clip, "logits_per_text"),
    "CLIP's images": (clip_images, "image_embeds"),
    "DeBERTa with its problem type": (lambda: deberta("single_label_classification"), "loss"),
    "Wav2Vec2, loss outside": (lambda: wav2vec2(labels=False), "logits"),
    "Whisper without SpecAugment": (lambda: whisper(False), "loss"),
}
REFUSED: dict[str, tuple[Callable[[], Case], str]] = {
    "Llava": (llava, r"modeling_llava.py:\d+, `.*read from the batch's values.*on_unsupported: eager"),
    "Qwen2-VL": (qwen2_vl, r"tolist\(\).*read from the batch's values.*on_unsupported: eager"),
    "DeBERTa": (deberta, r"modeling_deberta_v2.py:\d+, `label_index.*problem_type to 'single_label_classification'"),
    "Wav2Vec2": (wav2vec2, r"labels.max\(\).*leave labels out and compute the loss from logits"),
    "Wav2Vec2, LayerDrop": (lambda: wav2vec2(layerdrop=0.5), r"^layerdrop: 0.5 in .*set it to 0"),
    "Wav2Vec2, SpecAugment": (
        lambda: wav2vec2(apply_spec_augment=True, mask_time_length=2),
        r"^apply_spec_augment: .*apply_spec_augment = False",
    ),
    "OPT, LayerDrop": (opt_with_layerdrop, r"^layerdrop: 0.5 in base_model.model.model.decoder .*set it to 0"),
    "LoHa": (lambda: llama(LoHaConfig), r"q_proj: loha adapters .*use LoraConfig"),
    "LoKr": (lambda: llama(LoKrConfig), r"q_proj: lokr adapters .*use LoraConfig"),
    "Llama 4": (llama4, r"no complex numbers.*Llama 4.*on_unsupported: eager"),
    "Whisper, SpecAugment": (lambda: whisper(True), r"^apply_spec_augment: .*apply_spec_augment = False"),
}


def trained(model: torch.nn.Module, given: dict[str, Any], name: str, seed: int) -> list[torch.Tensor | None]:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    model.zero_grad()
    # Whisper hides parts of its input in place.
    value = getattr(model(**copy.deepcopy(given)), name)
    value.square().mean().backward()
    return [value.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]


def compare(case: Callable[[], Case], name: str, steps: int, **keys: Any) -> dict[str, Any]:
    """``steps`` steps on a prepared model and on its twin, equal to the bit; the prepared one's stats."""
    torch.manual_seed(0)
    model, given = case()
    eager = copy.deepcopy(model)
    prepare(model, config(plan_cache=None, **keys))
    for seed in range(steps):
        expected, values = (trained(m, given, name, seed) for m in (eager, model))
        for a, b in zip(values, expected, strict=True):
            assert (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))
    return stats(model)


@pytest.mark.parametrize("kind", PLANNED)
def test_the_field_that_is_differentiated_is_planned(kind: str) -> None:
    case, name = PLANNED[kind]
    counts = compare(case, name, 2)
    assert counts["steps_compiled"] == 2 and counts["steps_eager"] == 0


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_planned_says_why_and_what_would_work(kind: str) -> None:
    """And trains to eager's bits with ``on_unsupported: eager``."""
    case, message = REFUSED[kind]
    model, given = case()
    prepare(model, config(plan_cache=None))
    with pytest.raises(CaptureError, match=message):
        model(**given)
    counts = compare(case, "loss", 2, on_unsupported="eager")
    assert counts["steps_compiled"] == 0 and counts["steps_eager"] == 2


def test_an_output_without_any_real_tensor_is_refused() -> None:
    class Empty(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.trained = torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"ids": self.trained(self.frozen(x)).argmax(), "frozen": self.frozen(x)}

    model = prepare(Empty(), config(plan_cache=None))
    with pytest.raises(CaptureError, match="logits: the model returned none"):
        model(torch.ones(2, 4))


def test_two_fields_are_used_in_turn() -> None:
    """Each is right whichever was planned before, also once another length comes."""
    torch.manual_seed(0)
    model, _ = bert()
    eager = copy.deepcopy(model)
    prepare(model, config(plan_cache=None))
    for name, length in (
        ("last_hidden_state", 8),
        ("pooler_output", 8),
        ("last_hidden_state", 6),
        ("pooler_output", 8),
    ):
        expected, values = (trained(m, {"input_ids": ids(length)}, name, 0) for m in (eager, model))
        for a, b in zip(values, expected, strict=True):
            assert (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b)), (name, length)
    assert stats(model)["steps_eager"] == 0


def test_transforms_of_torch_func_are_refused_or_run_eagerly() -> None:
    model, eager = tiny_lora(**SMALL), tiny_lora(**SMALL)
    adapter = {name: p.detach().clone() for name, p in eager.named_parameters() if p.requires_grad}

    def gradients(of: torch.nn.Module) -> Any:
        def loss(swapped: dict[str, torch.Tensor]) -> torch.Tensor:
            found: torch.Tensor = torch.func.functional_call(of, swapped, (), batch()).loss
            return found

        return torch.func.grad(loss)(adapter)

    prepare(model, config())
    with pytest.raises(CaptureError, match=r"torch.func: .*restore\(model\)"):
        gradients(model)
    assert_same_step(model, eager)
    restore(model)
    prepare(model, config(on_unsupported="eager"))
    expected, found = gradients(eager), gradients(model)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert stats(model)["steps_eager"] == 1
    assert_same_step(model, eager)


def test_anomaly_detection_is_refused_or_runs_eagerly() -> None:
    model, eager = tiny_lora(**SMALL), tiny_lora(**SMALL)
    prepare(model, config())
    with torch.autograd.detect_anomaly(), pytest.raises(CaptureError, match=r"detect_anomaly: .*on_unsupported: eager"):
        model(**batch())
    restore(model)
    prepare(model, config(on_unsupported="eager"))
    with torch.autograd.detect_anomaly():
        assert_same_step(model, eager)
    assert stats(model)["steps_eager"] == 1
    assert_same_step(model, eager)
    assert stats(model)["steps_compiled"] == 1
