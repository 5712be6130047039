"""Preferences: rows of records with judged answers, and TRL's losses of them: DPO, ORPO and KTO. The reference of DPO
and KTO is the model with its adapter disabled."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.utils.data import SequentialSampler
from transformers.utils.generic import ModelOutput

from disco_accel.errors import ConfigError
from disco_accel.recipes.corpus import IGNORED, Blocks, padded_rows, read_text, tokens_of
from disco_accel.recipes.recording_trainer import RecordingTrainer
from disco_accel.recipes.settings import PAIRED, LoraRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PAIR, _COMPLETION, _MISMATCH, _DESIRABLE = ("chosen", "rejected"), "completion", "KL", "desirable"
_COLUMNS = ("input_ids", "attention_mask", "labels")
LOG_PROBABILITIES = "log_probs"
"""The field of the model's output that the loss is made of."""


def build_preferences(recipe: LoraRecipe, tokenizer: PreTrainedTokenizerBase) -> Blocks:
    """One row for each record of the dataset: of each answer ``input_ids``, ``attention_mask`` and ``labels``, the
    prompt before it without labels, cut or padded to ``max_length`` tokens.

    Columns are called ``chosen_input_ids`` and so on; with ``loss: kto`` ``completion_input_ids``, ``KL_input_ids`` of
    the same prompt with another completion, and ``desirable``, the record's label.

    Raises:
        ConfigError: the file is missing, empty or not UTF-8, a line is no record as the loss takes it, or its prompt
            leaves no room for an answer.
    """
    records = list(_records(recipe))
    at = f"dataset: {recipe.dataset}:"
    if not records:
        raise ConfigError(f"{at} is empty; give records of {_wanted(recipe.loss)}")
    paired = recipe.loss in PAIRED
    answers = {name: [record[name] for _, record in records] for name in (_PAIR if paired else (_COMPLETION,))}
    columns: dict[str, torch.Tensor] = {}
    if not paired:
        if len(records) == 1:
            raise ConfigError(f"{at} has one record; loss: kto needs the completion of another: give two or more")
        answers[_MISMATCH] = _mismatched(answers[_COMPLETION], recipe.per_device_train_batch_size)
        columns[_DESIRABLE] = torch.tensor([record["label"] for _, record in records])
    for answer, texts in answers.items():
        pieces = ([(record["prompt"], False), (text, True)] for (_, record), text in zip(records, texts, strict=True))
        rows = padded_rows([tokens_of(piece, tokenizer) for piece in pieces], recipe.max_length, tokenizer).columns
        filled = (rows["labels"][:, 1:] == IGNORED).all(1)
        if bool(filled.any()):
            where = records[int(filled.nonzero()[0])][0]
            raise ConfigError(
                f"{where}: its prompt fills max_length: {recipe.max_length}; give more, or a shorter prompt"
            )
        columns |= {f"{answer}_{name}": rows[name] for name in _COLUMNS}
    return Blocks(columns)


def _mismatched(completions: list[str], batch: int) -> list[str]:
    """TRL's: within each batch every prompt gets the completion of the record before it, the first that of the last."""
    batches = (completions[first : first + batch] for first in range(0, len(completions), batch))
    return [text for each in batches for text in (each[-1], *each[:-1])]


def _records(recipe: LoraRecipe) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(file and line, in words; the record)."""
    file, text = read_text(recipe.dataset, "dataset")
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"dataset: {file}: line {number}"
            yield where, _record(line, where, recipe.loss)


def _record(line: str, where: str, loss: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error})") from error
    texts = ("prompt", *(_PAIR if loss in PAIRED else (_COMPLETION,)))
    whole = isinstance(record, dict) and all(isinstance(record.get(name), str) and record[name] for name in texts)
    if whole and (loss in PAIRED or isinstance(record.get("label"), bool)):
        found: Mapping[str, Any] = record
        return found
    raise ConfigError(f"{where}: give an object with {_wanted(loss)}, as loss: {loss} takes it")


def _wanted(loss: str) -> str:
    if loss in PAIRED:
        return 'text "prompt", "chosen" and "rejected"'
    return 'text "prompt" and "completion", and "label", true or false'


@dataclass
class _LabelProbabilities(ModelOutput):
    """``log_probs``: of each label but a row's first, given all tokens before it; 0 where there is none. (rows, length
    - 1), float32."""

    log_probs: torch.Tensor | None = None


def give_log_probabilities(model: Any) -> None:
    """From now on ``model``, a causal language model, returns ``_LabelProbabilities`` if it is given ``labels``: its
    logits stay inside the forward. Its dropout modules drop nothing, as in TRL."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    own = model.forward

    @functools.wraps(type(model).forward)
    def forward(*args: Any, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        return output if labels is None else _LabelProbabilities(_of_labels(output.logits, labels))

    model.forward = forward


def _of_labels(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    wanted = labels[:, 1:]
    every = logits[:, :-1].float().log_softmax(-1)
    found = every.gather(-1, wanted.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return found.masked_fill(wanted == IGNORED, 0.0)


def preference_loss(
    policy: torch.Tensor, reference: torch.Tensor, lengths: torch.Tensor, *, beta: float, loss_type: str
) -> torch.Tensor:
    """TRL's ``sigmoid``, ``hinge`` or ``ipo``, the mean over pairs.

    ``policy``, ``reference``: log probabilities of whole answers, first all chosen ones, then the rejected ones in the
    same order. ``lengths``: their tokens.
    """
    ratios = policy - reference
    if loss_type == "ipo":
        ratios = ratios / lengths.clamp(min=1)
    chosen, rejected = ratios.chunk(2)
    margin = chosen - rejected
    if loss_type == "sigmoid":
        return -functional.logsigmoid(beta * margin).mean()
    if loss_type == "hinge":
        return torch.relu(1 - beta * margin).mean()
    return ((margin - 1 / (2 * beta)) ** 2).mean()


def odds_ratio_loss(found: torch.Tensor, answers: torch.Tensor, seen: torch.Tensor, *, beta: float) -> torch.Tensor:
    """TRL's ORPO: the mean over pairs of the log odds ratio's term, and the mean negative log likelihood of all tokens
    of chosen rows, prompts included.

    ``found``: log probabilities of tokens, (rows, length - 1), first all chosen rows, then the rejected ones in the
    same order. ``answers``, ``seen``: which tokens are of an answer, and which are no padding; both as ``found``.
    """
    kept = seen.chunk(2)[0]
    likelihood = found.chunk(2)[0].masked_fill(~kept, 0.0).sum() / kept.sum()
    means = found.masked_fill(~answers, 0.0).sum(1) / answers.sum(1)
    chosen, rejected = means.chunk(2)
    log_odds = (chosen - rejected) - (_log_of_rest(chosen) - _log_of_rest(rejected))
    return -likelihood - beta * functional.logsigmoid(log_odds).mean()


def _log_of_rest(log_p: torch.Tensor) -> torch.Tensor:
    """log(1 - p), by the one of two formulas that keeps more digits; less than -ln 2 is p < 1/2."""
    return torch.where(log_p < -math.log(2), torch.log1p(-torch.exp(log_p)), torch.log(-torch.expm1(log_p)))


def kto_loss(
    policy: torch.Tensor,
    reference: torch.Tensor,
    divergence: torch.Tensor,
    desirable: torch.Tensor,
    *,
    beta: float,
    weights: tuple[float, float],
) -> torch.Tensor:
    """TRL's ``kto``, the mean over rows.

    ``policy``, ``reference``: log probabilities of whole completions, (rows,). ``divergence``: the estimate of KL, one
    number without gradient. ``desirable``: bool, (rows,). ``weights``: of desirable rows, and of the others.
    """
    ratios = policy - reference - divergence
    losses = 1 - torch.sigmoid(beta * torch.where(desirable, ratios, -ratios))
    return (torch.where(desirable, *weights) * losses).mean()


def preference_trainer(recipe: LoraRecipe, **keys: Any) -> RecordingTrainer:
    """A trainer for rows of ``build_preferences`` and a model with ``give_log_probabilities``. ``keys``: those of
    Trainer."""
    trainer = _PreferenceTrainer(**keys)
    trainer.recipe = recipe
    return trainer


class _PreferenceTrainer(RecordingTrainer):
    recipe: LoraRecipe

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The loss is a mean over rows or pairs: that of a step is the mean over its micro-batches.
        self.model_accepts_loss_kwargs = False

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        # Each mismatched completion is of the batch that its row is in.
        if self.recipe.loss == "kto":
            rows: Any = self.train_dataset
            return SequentialSampler(rows)
        return super()._get_train_sampler(*args, **kwargs)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, output = {"dpo": self._dpo, "orpo": self._orpo, "kto": self._kto}[self.recipe.loss](model, inputs)
        return (loss, output) if return_outputs else loss

    def _dpo(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        batch = _batch(inputs, *_PAIR)
        (reference,) = self._references(model, batch)
        output = model(**batch)
        lengths = (batch["labels"][:, 1:] != IGNORED).sum(1)
        beta, loss_type = self.recipe.beta, self.recipe.loss_type
        return preference_loss(output.log_probs.sum(1), reference, lengths, beta=beta, loss_type=loss_type), output

    def _orpo(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        batch = _batch(inputs, *_PAIR)
        answers, padding = batch["labels"][:, 1:] != IGNORED, batch["attention_mask"] == 0
        output = model(**batch | {"labels": batch["input_ids"].masked_fill(padding, IGNORED)})
        return odds_ratio_loss(output.log_probs, answers, ~padding[:, 1:], beta=self.recipe.beta), output

    def _kto(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        batch, mismatched = _batch(inputs, _COMPLETION), _batch(inputs, _MISMATCH)
        reference, reference_of_mismatched = self._references(model, batch, mismatched)
        with torch.no_grad():
            divergence = (model(**mismatched).log_probs.sum(1) - reference_of_mismatched).mean()
            divergence = self.accelerator.gather(divergence).mean().clamp(min=0)
        output = model(**batch)
        beta, weights = self.recipe.beta, (self.recipe.desirable_weight, self.recipe.undesirable_weight)
        policy, desirable = output.log_probs.sum(1), inputs[_DESIRABLE]
        return kto_loss(policy, reference, divergence, desirable, beta=beta, weights=weights), output

    def _references(self, model: Any, *batches: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Log probabilities of whole answers by the model with its adapter disabled, of each batch (rows,)."""
        with torch.no_grad(), self.accelerator.unwrap_model(model).disable_adapter():
            return [model(**batch).log_probs.sum(1) for batch in batches]


def _batch(inputs: Mapping[str, torch.Tensor], *answers: str) -> dict[str, torch.Tensor]:
    """The model's arguments: rows of the first of ``answers``, then those of the next."""
    return {name: torch.cat([inputs[f"{answer}_{name}"] for answer in answers]) for name in _COLUMNS}
