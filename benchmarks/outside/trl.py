"""TRL's trainers on a tiny Llama, each without us and with ``DiscoCallback``; run by ``benchmarks.outside``.

A pytest module. Under ``--disco=off`` both runs are without us, which says that a run repeats itself to the bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl.trainer.utils
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.loss.loss_utils import ForCausalLMLoss
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from disco_accel import DiscoCallback, DiscoConfig

WORDS = [f"word{at}" for at in range(15)]
STEPS = 4
_SHARED: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "float32": {"bf16": False},
    "no checkpointing": {"gradient_checkpointing": False},
    "accumulation": {"gradient_accumulation_steps": 2},
}
"""Besides ``_SHARED``. By default the trainers checkpoint and train in bf16."""


def _tokenizer() -> PreTrainedTokenizerFast:
    names = ["<pad>", "</s>", "<unk>", *WORDS]
    words = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def _sentences(seed: int, shortest: int, longest: int, rows: int = 16) -> list[str]:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    return [" ".join(WORDS[draw(0, len(WORDS))] for _ in range(draw(shortest, longest + 1))) for _ in range(rows)]


def _sft(arguments: dict[str, Any]) -> tuple[Any, Any, Dataset]:
    return SFTTrainer, SFTConfig(**arguments), Dataset.from_dict({"text": _sentences(0, 6, 7)})


def _dpo(arguments: dict[str, Any]) -> tuple[Any, Any, Dataset]:
    longest = {"prompt": 4, "chosen": 5, "rejected": 5}
    rows = {name: _sentences(seed, 4, words) for seed, (name, words) in enumerate(longest.items())}
    # Else the prompt's last word and the next one would be one token.
    rows["prompt"] = [f"{prompt} " for prompt in rows["prompt"]]
    return DPOTrainer, DPOConfig(**arguments), Dataset.from_dict(rows)


TRAINERS = {"SFT": _sft, "DPO": _dpo}


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=2, max_position_embeddings=64, **sizes))


def _full_logits_loss(output: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return ForCausalLMLoss(output.logits, labels, output.logits.shape[-1], num_items_in_batch)


def _train(
    trainer: str, settings: dict[str, Any], folder: Path, config: DiscoConfig | None, **more: Any
) -> tuple[list[dict[str, float]], bytes]:
    """What was logged, without times, and the file of adapters that the trainer saves."""
    kind, arguments, rows = TRAINERS[trainer]({"output_dir": str(folder), **_SHARED, **settings})
    made = kind(
        model=_model(),
        args=arguments,
        train_dataset=rows,
        processing_class=_tokenizer(),
        peft_config=LoraConfig(target_modules="all-linear", lora_dropout=0.1),
        callbacks=[] if config is None else [DiscoCallback(config)],
        **more,
    )
    made.train()
    made.save_model()
    timed = ("runtime", "per_second", "planning_seconds")
    logged = [{k: v for k, v in entry.items() if not k.endswith(timed)} for entry in made.state.log_history]
    return logged, (folder / "adapter_model.safetensors").read_bytes()


@pytest.fixture
def config(pytestconfig: pytest.Config) -> DiscoConfig | None:
    """That of the second run; None without us."""
    off = pytestconfig.getoption("--disco") == "off"
    return None if off else DiscoConfig.from_yaml(pytestconfig.getoption("--disco-config"))


def _compare(trainer: str, settings: dict[str, Any], folder: Path, config: DiscoConfig | None, **more: Any) -> None:
    """All that is logged but times, and the bytes of the saved adapters."""
    expected = _train(trainer, settings, folder / "plain", None, **more)
    found = _train(trainer, settings, folder / "callback", config, **more)
    assert found[0] == expected[0] and sum("loss" in entry for entry in found[0]) == STEPS
    assert found[1] == expected[1]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_training(trainer: str, settings: str, tmp_path: Path, config: DiscoConfig | None) -> None:
    """The same logs and adapters."""
    _compare(trainer, SETTINGS[settings], tmp_path, config)


@pytest.mark.parametrize(("trainer", "own_loss"), [("SFT", False), ("SFT", True), ("DPO", False)])
def test_as_on_cuda(
    trainer: str, own_loss: bool, tmp_path: Path, config: DiscoConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the head's positions chosen by the labels, as TRL does where it has Triton. ``own_loss``: from logits."""
    monkeypatch.setattr(trl.trainer.utils, "_use_triton", lambda device: True)
    _compare(trainer, {}, tmp_path, config, **({"compute_loss_func": _full_logits_loss} if own_loss else {}))
