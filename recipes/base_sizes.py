"""The facts that a first recipe goes by: sizes of a model without its weights, and tokens of a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from disco_accel.errors import ConfigError
from disco_accel.quantised.forms import PackedForm, PackedWeight
from disco_accel.quantised.libraries import STORED_FORMS
from disco_accel.recipes.corpus import Document, read_documents, read_text, tokens_of
from disco_accel.recipes.first_recipe import BaseSizes, DataFacts
from disco_accel.recipes.model_names import FoundModel
from disco_accel.recipes.outline import meta_base
from disco_accel.recipes.quantised import packable, stored_form
from disco_accel.recipes.settings import LoraRecipe

_NOVEL = Path(__file__).with_name("data") / "persuasion.txt"
_RECORDS = 1000
"""Of a file, whose tokens are counted: enough to know their lengths."""
_TEXT = 1 << 20
"""Characters of a text that are counted."""
_FEWEST = 16
"""Tokens that make rows."""
_BYTES_PER_TOKEN = 4
"""Of English text."""


def base_sizes(found: FoundModel, *, on_host: bool) -> tuple[BaseSizes, str]:
    """Sizes of the model that ``found`` names, in the data type that a recipe gives it, and the implementation of
    attention that it takes. On a GPU that is bfloat16, on the host device the checkpoint's.

    Raises:
        ConfigError: transformers has no such architecture, or the weights are packed in a form of unknown size.
    """
    attention = found.attention or "sdpa"
    packs = bool(found.config.get("quantization_config"))
    base = meta_base(
        LoraRecipe(
            model_name_or_path=found.name,
            dataset="-",
            output_dir="-",
            max_steps=1,
            max_length=2,
            dtype="auto" if on_host or packs else "bfloat16",
            attn_implementation=attention,
        )
    )
    stored = _stored(found, base.config)
    config: Any = base.config.get_text_config()
    shapes = packable(base)
    dtype = str(next(base.parameters()).dtype).removeprefix("torch.")
    share = _active_share(config)
    numbers = active = nbytes = packed = 0
    for parameter in base.parameters():
        numbers += parameter.numel()
        nbytes += parameter.numel() * parameter.element_size()
        of_experts = parameter.ndim == 3
        active += int(parameter.numel() * share) if of_experts else parameter.numel()
        shape = shapes.get(id(parameter))
        if shape is None:
            packed += parameter.numel() * parameter.element_size()
        else:
            form = stored or PackedForm.NF4
            weight = PackedWeight(form, shape.outputs, shape.inputs, dtype, shape.inputs_first)
            packed += sum(part.bytes for part in STORED_FORMS[form].parts(weight))
    return BaseSizes(
        numbers=numbers,
        active=active - _looked_up(base),
        bytes=nbytes,
        packed=packed,
        adapter=sum(shape.outputs + shape.inputs for shape in shapes.values()),
        vocabulary=config.vocab_size,
        dtype=dtype,
        positions=getattr(config, "max_position_embeddings", None),
        stored=stored or "",
        experts=any(parameter.ndim == 3 for parameter in base.parameters()),
    ), attention


def _stored(found: FoundModel, config: Any) -> PackedForm | None:
    try:
        return stored_form(config)
    except ConfigError:
        method = (found.config.get("quantization_config") or {}).get("quant_method", "an unknown library")
        raise ConfigError(
            f"MODEL: {found.name}: its weights are packed by {method}, and nobody here knows their sizes; give a "
            "checkpoint in bfloat16, or one packed in NF4"
        ) from None


def _active_share(config: Any) -> float:
    """The part of a mixture's experts that a token goes through."""
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    taken = getattr(config, "num_experts_per_tok", None)
    return taken / experts if experts and taken else 1.0


def _looked_up(base: torch.nn.Module) -> int:
    """Numbers of the embedding of tokens, which nothing is multiplied with unless the output layer has it too."""
    embedding, output = (getattr(base, f"get_{side}_embeddings")() for side in ("input", "output"))
    tied = output is not None and output.weight is embedding.weight
    return 0 if tied else int(embedding.weight.numel())


def data_facts(path: str | None, found: FoundModel) -> DataFacts:
    """About the rows of ``path``; None: the text of this package. The first thousand records are counted, with the
    tokenizer of ``found`` where it is here.

    Raises:
        ConfigError: the file is missing or empty, or a record is none; the tokenizer cannot read conversations.
    """
    file = _NOVEL if path is None else Path(path)
    try:
        _, text = read_text(file, "--data")
        tokenizer = _tokenizer(found)
        counts = [_tokens(document, tokenizer) for document in islice(read_documents(file), _RECORDS)]
    except ConfigError as error:
        raise ConfigError(f"--data: {str(error).removeprefix('dataset: ').removeprefix('--data: ')}") from None
    tokens, typical = sum(counts), 0
    if tokens < _FEWEST:
        raise ConfigError(f"--data: {file}: has {tokens} tokens; give a file with more text in it")
    if file.suffix == ".jsonl":
        records = sum(1 for line in text.split("\n") if line.strip())
        tokens = tokens * records // len(counts)
        typical = max(2, sorted(counts)[len(counts) * 95 // 100])
    shown = os.path.relpath(file) if file.is_absolute() and file.is_relative_to(Path.cwd()) else str(file)
    return DataFacts(shown, tokens, typical, trial=path is None, counted=tokenizer is not None)


def _tokenizer(found: FoundModel) -> Any:
    """The model's, if it is on this machine."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(found.name, local_files_only=True)
    except (OSError, ValueError, ImportError):
        return None


def _tokens(document: Document, tokenizer: Any) -> int:
    """About how many tokens a document has."""
    pieces = [text for text, _ in document] if isinstance(document, list) else list(_contents(document.messages))
    length = sum(map(len, pieces))
    if tokenizer is None:
        return max(1, length // _BYTES_PER_TOKEN)
    if length > _TEXT and isinstance(document, list):
        beginning = tokens_of([("".join(pieces)[:_TEXT], True)], tokenizer)[0]
        return len(beginning) * length // _TEXT
    return len(tokens_of(document, tokenizer)[0])


def _contents(messages: list[dict[str, Any]]) -> Iterator[str]:
    return (str(message["content"]) for message in messages)
