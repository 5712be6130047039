"""transformers' own overfit test on three families, each trained whole and with LoRA; run by ``benchmarks.outside``.

A pytest module. The test itself is ``TrainingTesterMixin`` of transformers' source distribution, whose ``tests`` folder
has to be on ``sys.path``; here are only the tiny models that it is given.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from test_training_mixin import TrainingTesterMixin
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from tests.support.models import TEN_FAMILIES

_SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 99, "max_position_embeddings": 128}


def _whole(config: PretrainedConfig) -> torch.nn.Module:
    return AutoModelForCausalLM.from_config(config)


def _lora(config: PretrainedConfig) -> torch.nn.Module:
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", modules_to_save=["embed_tokens", "lm_head"])
    return get_peft_model(_whole(config), adapter)


def _tester(family: str, build: Callable[[PretrainedConfig], torch.nn.Module]) -> Any:
    settings = {**TEN_FAMILIES[family], **_SIZES}
    config = AutoConfig.for_model(family, **settings, pad_token_id=0, tie_word_embeddings=False)
    inputs = {"input_ids": torch.ones(2, 8, dtype=torch.long)}
    return SimpleNamespace(
        is_training=True,
        causal_lm_class=build,
        get_config=lambda: config,
        prepare_config_and_inputs_for_common=lambda: (config, inputs),
    )


class _Overfit(TrainingTesterMixin):
    family: str
    build = staticmethod(_whole)

    @property
    def model_tester(self) -> Any:
        return _tester(self.family, self.build)


class _OverfitLora(_Overfit):
    build = staticmethod(_lora)
    # A rank of 16 learns slower than whole matrices.
    training_overfit_learning_rate = 1e-2


class TestLlama(_Overfit, unittest.TestCase):
    """All weights trained."""

    family = "llama"


class TestQwen3(_Overfit, unittest.TestCase):
    """All weights trained."""

    family = "qwen3"


class TestGemma2(_Overfit, unittest.TestCase):
    """All weights trained."""

    family = "gemma2"


class TestLlamaLora(_OverfitLora, unittest.TestCase):
    """Adapters, embedding and head trained."""

    family = "llama"


class TestQwen3Lora(_OverfitLora, unittest.TestCase):
    """Adapters, embedding and head trained."""

    family = "qwen3"


class TestGemma2Lora(_OverfitLora, unittest.TestCase):
    """Adapters, embedding and head trained."""

    family = "gemma2"
