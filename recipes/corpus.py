"""From a text file to fixed-length blocks of token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from disco_accel.errors import ConfigError
from disco_accel.recipes.chat import Chat, chat_tokens, read_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""The label of a token that carries no loss."""


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Rows of int64 ``input_ids`` and ``labels``, both (rows, max_length); padded ones an ``attention_mask`` too.
    Preferences have these of each answer."""

    def __init__(self, columns: dict[str, torch.Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {name: column[row] for name, column in self.columns.items()}


Document = list[tuple[str, bool]] | Chat
"""Pieces of text in order, each with whether its tokens carry loss; or a conversation."""


def read_documents(path: str | Path, *, completion_only_loss: bool = True) -> Iterator[Document]:
    """Yield the documents of a ``.jsonl`` file (one record a line) or of a plain text file (one document).

    Raises:
        ConfigError: the file is missing or not UTF-8, or a line is no record of messages, of a prompt with completion
            or of text.
    """
    file, text = read_text(path, "dataset")
    if file.suffix != ".jsonl":
        if text.strip():
            yield [(text, True)]
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _record(line, f"dataset: {file}: line {number}", completion_only_loss)


def read_prompts(path: str | Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the prompts of a ``.jsonl`` file (one record a line) or of a plain text file (line 1).

    Raises:
        ConfigError: the file is missing, empty or not UTF-8, or a line is not a record with a prompt, or text.
    """
    file, text = read_text(path, "prompts")
    if not text.strip():
        raise ConfigError(f"prompts: {file}: is empty; give a file with text in it")
    if file.suffix != ".jsonl":
        yield 1, text
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            record = _json(line, f"prompts: {file}: line {number}")
            prompt = record.get("prompt", record.get("text")) if isinstance(record, dict) else None
            if not isinstance(prompt, str) or not prompt:
                raise ConfigError(f'prompts: {file}: line {number}: give an object with text "prompt", or "text"')
            yield number, prompt


def read_text(path: str | Path, key: str) -> tuple[Path, str]:
    """The file that the recipe's ``key`` names, and its text. Raises ConfigError: it is missing or not UTF-8."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{key}: {file}: no such file; give a .jsonl or a text file")
    try:
        return file, file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}: {file}: not UTF-8 text (byte {error.start}); convert it") from error


def _json(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error})") from error


def _record(line: str, where: str, completion_only_loss: bool) -> Document:
    record = _json(line, where)
    if isinstance(record, dict):
        # Files made from tables have every column in every record, and null where there is nothing.
        if record.get("messages") is not None:
            return read_chat(record, where)
        if isinstance(record.get("text"), str):
            return [(record["text"], True)]
        prompt, completion = record.get("prompt"), record.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            return [(prompt, not completion_only_loss), (completion, True)]
    raise ConfigError(f'{where}: give an object with "messages", with text "prompt" and "completion", or "text"')


def tokens_of(
    document: Document, tokenizer: PreTrainedTokenizerBase, assistant_only: bool = False
) -> tuple[list[int], list[int]]:
    """Token ids of a document, with those that the tokenizer puts around it, and labels. Raises ConfigError."""
    if isinstance(document, Chat):
        # The template has all special tokens that a conversation wants.
        chat_ids, carry = chat_tokens(document, tokenizer, assistant_only=assistant_only)
        return chat_ids, [token if loss else IGNORED for token, loss in zip(chat_ids, carry, strict=True)]
    if assistant_only:
        raise ConfigError("assistant_only_loss: is for records with messages, and dataset has others; set it to false")
    ids: list[int] = []
    labels: list[int] = []
    if tokenizer.bos_token_id is not None:
        ids.append(tokenizer.bos_token_id)
        labels.append(IGNORED)
    for text, carries_loss in document:
        piece: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        ids += piece
        labels += piece if carries_loss else [IGNORED] * len(piece)
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
        labels.append(tokenizer.eos_token_id)
    return ids, labels


def build_blocks(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    packing: bool = True,
    completion_only_loss: bool = True,
    assistant_only_loss: bool = False,
) -> Blocks:
    """Tokenize ``path`` into rows of exactly ``max_length`` tokens.

    With ``packing`` documents are joined and cut, and what does not fill a last row is left out; otherwise each
    document is one row, cut or padded on the right. ``assistant_only_loss``: of conversations, only what the assistant
    wrote carries loss.

    Raises:
        ConfigError: the file is wrong (see ``read_documents``), its conversations do not go with the tokenizer, or it
            gives no row.
    """
    documents = read_documents(path, completion_only_loss=completion_only_loss)
    rows = [tokens_of(document, tokenizer, assistant_only_loss) for document in documents]
    if not rows:
        raise ConfigError(f"dataset: {path}: is empty; give a file with text in it")
    blocks = _packed(rows, max_length) if packing else padded_rows(rows, max_length, tokenizer)
    if len(blocks) == 0:
        total = sum(len(ids) for ids, _ in rows)
        raise ConfigError(
            f"dataset: {path}: {total} tokens do not fill one row of max_length: {max_length}; give more text"
        )
    if not bool((blocks.columns["labels"][:, 1:] != IGNORED).any()):
        raise ConfigError(f"dataset: {path}: no token carries loss; prompts fill max_length: {max_length}, give more")
    return blocks


def _packed(rows: list[tuple[list[int], list[int]]], max_length: int) -> Blocks:
    ids = torch.tensor([token for row, _ in rows for token in row], dtype=torch.int64)
    labels = torch.tensor([label for _, row in rows for label in row], dtype=torch.int64)
    count = len(ids) // max_length
    shape = (count, max_length)
    used = count * max_length
    return Blocks({"input_ids": ids[:used].view(shape), "labels": labels[:used].view(shape)})


def padded_rows(rows: list[tuple[list[int], list[int]]], max_length: int, tokenizer: PreTrainedTokenizerBase) -> Blocks:
    """Each of ``rows``, token ids with labels, cut or padded on the right."""
    shape = (len(rows), max_length)
    ids = torch.full(shape, _pad_token(tokenizer), dtype=torch.int64)
    labels = torch.full(shape, IGNORED, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.int64)
    for index, (row, row_labels) in enumerate(rows):
        length = min(len(row), max_length)
        ids[index, :length] = torch.tensor(row[:length])
        labels[index, :length] = torch.tensor(row_labels[:length])
        mask[index, :length] = 1
    return Blocks({"input_ids": ids, "labels": labels, "attention_mask": mask})


def _pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0
