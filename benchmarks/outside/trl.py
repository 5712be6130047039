"""TRL's trainers on a tiny Llama or Qwen3, without us and with ``DiscoCallback``; run by ``benchmarks.outside``.

A pytest module. Under ``--disco=off`` both runs are without us, which says that a run repeats itself to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import trl.trainer.utils
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.loss.loss_utils import ForCausalLMLoss
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from disco_accel import DiscoCallback, DiscoConfig, stats

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


@dataclass(frozen=True)
class _Kind:
    """A trainer with the class of its arguments, its rows, and its model. ``given``: some of the arguments; ``keys``:
    of the trainer, for a list that gets what its rewards saw."""

    trainer: Any
    arguments: Any
    rows: Callable[[], dict[str, Any]]
    model: Callable[[], Any]
    given: dict[str, Any] = field(default_factory=dict)
    keys: Callable[[list[Any]], dict[str, Any]] = lambda _: {}
    task: str = "CAUSAL_LM"


def _texts() -> dict[str, Any]:
    return {"text": _sentences(0, 6, 7)}


def _preferences() -> dict[str, Any]:
    longest = {"prompt": 4, "chosen": 5, "rejected": 5}
    rows = {name: _sentences(seed, 4, words) for seed, (name, words) in enumerate(longest.items())}
    # Else the prompt's last word and the next one would be one token.
    return rows | {"prompt": [f"{prompt} " for prompt in rows["prompt"]]}


def _judged() -> dict[str, Any]:
    rows = _preferences()
    return {"prompt": rows["prompt"], "completion": rows["chosen"], "label": [at % 2 == 0 for at in range(16)]}


def _pairs() -> dict[str, Any]:
    rows = _preferences()
    return {"chosen": rows["chosen"], "rejected": rows["rejected"]}


def _prompts() -> dict[str, Any]:
    # Of two lengths, so that the shorter ones are padded on the left.
    return {"prompt": _sentences(0, 3, 4)}


def _rewards(seen: list[Any]) -> dict[str, Any]:
    def variety(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        rewards = [float(len(set(text.split()))) for text in completions]
        seen.append((completion_ids, rewards))
        return rewards

    return {"reward_funcs": variety}


_SIZES: dict[str, int] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def _llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_SIZES))


def _qwen() -> Any:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**_SIZES, head_dim=8))


def _judge() -> Any:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(**_SIZES, num_labels=1, pad_token_id=0))


_ROLLOUTS: dict[str, Any] = {"num_generations": 2, "max_completion_length": 6, "beta": 0.04}
TRAINERS = {
    "SFT": _Kind(SFTTrainer, SFTConfig, _texts, _llama),
    "DPO": _Kind(DPOTrainer, DPOConfig, _preferences, _llama),
    "KTO": _Kind(KTOTrainer, KTOConfig, _judged, _llama),
    "GRPO": _Kind(
        GRPOTrainer,
        GRPOConfig,
        _prompts,
        _qwen,
        _ROLLOUTS,
        _rewards,
    ),
    "Reward": _Kind(RewardTrainer, RewardConfig, _pairs, _judge, task="SEQ_CLS"),
}


def _full_logits_loss(output: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return ForCausalLMLoss(output.logits, labels, output.logits.shape[-1], num_items_in_batch)


@dataclass
class _Trained:
    """What was logged, without times; tokens and rewards of rollouts; the file of adapters that the trainer saves; the
    figures of its plans."""

    logged: list[dict[str, Any]]
    rollouts: list[Any]
    adapters: bytes
    figures: dict[str, Any]


def _train(trainer: str, settings: dict[str, Any], folder: Path, config: DiscoConfig | None, **more: Any) -> _Trained:
    kind = TRAINERS[trainer]
    rollouts: list[Any] = []
    made = kind.trainer(
        model=kind.model(),
        args=kind.arguments(output_dir=str(folder), **{**_SHARED, **kind.given, **settings}),
        train_dataset=Dataset.from_dict(kind.rows()),
        processing_class=_tokenizer(),
        peft_config=LoraConfig(target_modules="all-linear", lora_dropout=0.1, task_type=kind.task),
        callbacks=[] if config is None else [DiscoCallback(config)],
        **kind.keys(rollouts),
        **more,
    )
    made.train()
    made.save_model()
    timed = ("runtime", "per_second", "planning_seconds", "step_time")
    logged = [{k: v for k, v in entry.items() if not k.endswith(timed)} for entry in made.state.log_history]
    return _Trained(logged, rollouts, (folder / "adapter_model.safetensors").read_bytes(), stats(made.model))


@pytest.fixture
def config(pytestconfig: pytest.Config) -> DiscoConfig | None:
    """That of the second run; None without us."""
    off = pytestconfig.getoption("--disco") == "off"
    return None if off else DiscoConfig.from_yaml(pytestconfig.getoption("--disco-config"))


def _compare(
    trainer: str, settings: dict[str, Any], folder: Path, config: DiscoConfig | None, **more: Any
) -> dict[str, Any]:
    """All that is logged but times, what rollouts gave, and the bytes of the saved adapters; the figures of plans."""
    expected = _train(trainer, settings, folder / "plain", None, **more)
    found = _train(trainer, settings, folder / "callback", config, **more)
    assert found.logged == expected.logged and sum("loss" in entry for entry in found.logged) == STEPS
    assert found.rollouts == expected.rollouts and bool(found.rollouts) == (trainer == "GRPO")
    assert found.adapters == expected.adapters
    return found.figures


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_training(trainer: str, settings: str, tmp_path: Path, config: DiscoConfig | None) -> None:
    """The same logs, rollouts and adapters, all from plans."""
    figures = _compare(trainer, SETTINGS[settings], tmp_path, config)
    if config is not None:
        assert figures["fallbacks"] == [] and figures["steps_eager"] == figures["forwards_unplanned"] == 0
        assert figures["steps_compiled"] > 0 and (figures["forwards_planned"] > 0) == (
            trainer in ("DPO", "KTO", "GRPO")
        )


def test_rollouts_with_a_static_cache(tmp_path: Path, config: DiscoConfig | None) -> None:
    """As ``test_training``, where GRPOTrainer's default is a cache that grows."""
    figures = _compare("GRPO", {"cache_implementation": "static"}, tmp_path, config)
    if config is not None:
        assert figures["fallbacks"] == [] and figures["steps_eager"] == figures["forwards_unplanned"] == 0
        assert figures["forwards_planned"] > 0


@pytest.mark.parametrize(("trainer", "own_loss"), [("SFT", False), ("SFT", True), ("DPO", False)])
def test_as_on_cuda(
    trainer: str, own_loss: bool, tmp_path: Path, config: DiscoConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the head's positions chosen by the labels, as TRL does where it has Triton; a plan scores all of them, which
    rounds otherwise. ``own_loss``: from logits."""
    monkeypatch.setattr(trl.trainer.utils, "_use_triton", lambda device: True)
    more = {"compute_loss_func": _full_logits_loss} if own_loss else {}
    expected = _train(trainer, {}, tmp_path / "plain", None, **more)
    found = _train(trainer, {}, tmp_path / "callback", config, **more)
    for ours, theirs in zip(found.logged, expected.logged, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    if config is not None:
        assert found.figures["fallbacks"] == [] and found.figures["steps_eager"] == 0
