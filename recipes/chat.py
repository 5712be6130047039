"""Conversations: from a record's ``messages`` to token ids, by the tokenizer's own chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from disco_accel.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The tag by which a template says what the assistant wrote; transformers looks for the same."""


@dataclass(frozen=True, slots=True)
class Chat:
    """One conversation: ``messages`` as in the file, each with a role and a content; ``where`` it is, for errors."""

    messages: list[dict[str, Any]]
    where: str


def read_chat(record: Mapping[str, Any], where: str) -> Chat:
    """The conversation of a record that has ``messages``.

    Raises:
        ConfigError: they are no list of objects with text ``role`` and ``content``, or there are tools beside them.
    """
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f'{where}: messages: give a list of {{"role": ..., "content": ...}}, one or more')
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ConfigError(f'{where}: messages: number {number} needs text "role" and "content"')
    for key in ("tools", "chat_template_kwargs"):
        if record.get(key):
            raise ConfigError(f"{where}: {key}: is not passed on to the chat template; leave it out")
    return Chat(messages, where)


def chat_tokens(
    chat: Chat, tokenizer: PreTrainedTokenizerBase, *, assistant_only: bool
) -> tuple[list[int], list[bool]]:
    """Token ids of a whole conversation, and of each whether it carries loss: all do, or what the assistant wrote.

    Raises:
        ConfigError: the tokenizer has no chat template, the template refuses the messages, or it does not say what the
            assistant wrote.
    """
    template = _template(chat, tokenizer)
    if assistant_only and not _GENERATION.search(template):
        raise ConfigError(
            "assistant_only_loss: the tokenizer's chat template does not mark what the assistant writes; put "
            "{% generation %} and {% endgeneration %} around it in chat_template.jinja, or set the key to false"
        )
    try:
        encoded: Any = tokenizer.apply_chat_template(
            chat.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=assistant_only
        )
    except (TemplateError, ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"{chat.where}: messages: the tokenizer's chat template refuses them: {error}") from error
    ids = [int(token) for token in encoded["input_ids"]]
    return ids, [bool(mark) for mark in encoded["assistant_masks"]] if assistant_only else [True] * len(ids)


def _template(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.chat_template
    if not template:
        raise ConfigError(
            f"{chat.where}: has messages, but the tokenizer of {tokenizer.name_or_path} has no chat template; put the "
            "model's chat_template.jinja into its folder, take a model that was trained on chats, or give records with "
            "prompt and completion"
        )
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise ConfigError(f"{chat.where}: messages: no single chat template: {error}") from error
