"""Conversations are tokenized as their template says, with loss on all of it or on what the assistant wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from disco_accel.errors import ConfigError
from disco_accel.recipes.corpus import IGNORED, build_blocks
from disco_accel.recipes.lora import main

PLAIN = "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}"
MARKED = (
    "{% for m in messages %}<s>{{ m['role'] }}:{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}</s>"
    "{% endgeneration %}{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
)
TALK = [
    {"role": "system", "content": "short answers"},
    {"role": "user", "content": "what is a small model"},
    {"role": "assistant", "content": "one that needs a small text"},
    {"role": "user", "content": "and then"},
    {"role": "assistant", "content": "a small test"},
]


def with_template(checkpoint: Path, template: str | None) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = template
    return tokenizer


def chats(folder: Path, *records: Any) -> Path:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_conversation_is_what_the_template_says_and_all_of_it_carries_loss(tmp_path: Path, checkpoint: Path) -> None:
    """No special token beside the template's."""
    tokenizer = with_template(checkpoint, PLAIN)
    row = build_blocks(chats(tmp_path, {"messages": TALK}), tokenizer, max_length=256, packing=False)[0]
    count = int(row["attention_mask"].sum())
    text = "".join(f"<s>{m['role']}:{m['content']}</s>" for m in TALK)
    assert row["input_ids"][:count].tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert row["labels"][:count].equal(row["input_ids"][:count])
    assert set(row["labels"][count:].tolist()) <= {IGNORED}


def test_what_the_assistant_wrote_alone_carries_loss_if_asked(tmp_path: Path, checkpoint: Path) -> None:
    tokenizer = with_template(checkpoint, MARKED)
    path = chats(tmp_path, {"messages": TALK})
    row = build_blocks(path, tokenizer, max_length=256, packing=False, assistant_only_loss=True)[0]
    all_of_it = build_blocks(path, tokenizer, max_length=256, packing=False)[0]
    assert row["input_ids"].equal(all_of_it["input_ids"])
    learned = row["labels"][row["labels"] != IGNORED]
    assert tokenizer.decode(learned) == "".join(m["content"] + "</s>" for m in TALK if m["role"] == "assistant")


def test_a_record_without_messages_in_a_column_for_them_is_read_as_what_it_has(
    tmp_path: Path, checkpoint: Path
) -> None:
    path = chats(
        tmp_path, {"messages": None, "text": "a small text " * 9}, {"messages": TALK, "text": None, "prompt": "x"}
    )
    blocks = build_blocks(path, with_template(checkpoint, PLAIN), max_length=64, packing=False)
    assert len(blocks) == 2 and blocks[0]["input_ids"][0] == blocks[1]["input_ids"][0]


def test_a_conversation_in_which_the_assistant_is_silent_teaches_nothing(tmp_path: Path, checkpoint: Path) -> None:
    path = chats(tmp_path, {"messages": TALK[:2]})
    with pytest.raises(ConfigError, match="no token carries loss"):
        build_blocks(path, with_template(checkpoint, MARKED), max_length=64, packing=False, assistant_only_loss=True)


def test_conversations_are_packed_like_texts(tmp_path: Path, checkpoint: Path) -> None:
    blocks = build_blocks(
        chats(tmp_path, *[{"messages": TALK}] * 9), with_template(checkpoint, PLAIN), max_length=32, packing=True
    )
    assert len(blocks) > 9 and {len(row["input_ids"]) for row in blocks} == {32}


@pytest.mark.parametrize(
    ("template", "record", "options", "words"),
    [
        (None, {"messages": TALK}, {}, ["line 2", "no chat template", "chat_template.jinja"]),
        (
            PLAIN,
            {"messages": TALK},
            {"assistant_only_loss": True},
            ["assistant_only_loss", "{% generation %}", "false"],
        ),
        (MARKED, {"text": "plain"}, {"assistant_only_loss": True}, ["assistant_only_loss", "messages"]),
        ("{{ raise_exception('roles must alternate') }}", {"messages": TALK}, {}, ["line 2", "roles must alternate"]),
        ("{{ oops", {"messages": TALK}, {}, ["line 2", "template"]),
        (PLAIN, {"messages": []}, {}, ["line 2", "one or more"]),
        (PLAIN, {"messages": "hello"}, {}, ["line 2", "list"]),
        (PLAIN, {"messages": [{"role": "user"}]}, {}, ["line 2", "number 1", "content"]),
        (PLAIN, {"messages": [*TALK, {"role": "user", "content": [{"type": "image"}]}]}, {}, ["number 6", "text"]),
        (PLAIN, {"messages": TALK, "tools": [{"name": "f"}]}, {}, ["line 2", "tools", "leave it out"]),
        ({"a": PLAIN, "b": PLAIN}, {"messages": TALK}, {}, ["line 2", "template"]),
    ],
)
def test_what_cannot_be_a_conversation_is_refused_with_what_to_do(
    tmp_path: Path, checkpoint: Path, template: Any, record: Any, options: dict[str, Any], words: list[str]
) -> None:
    first = {"messages": TALK} if template in (PLAIN, MARKED) else {"text": "no conversation"}
    path = chats(tmp_path, first, record)
    with pytest.raises(ConfigError) as caught:
        build_blocks(path, with_template(checkpoint, template), max_length=64, packing=False, **options)
    for word in words:
        assert word in str(caught.value)


def test_a_recipe_trains_on_conversations(values: dict[str, Any], tmp_path: Path, checkpoint: Path) -> None:
    """With a template beside the checkpoint's tokenizer, as models that were trained on chats have it."""
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    (folder / "chat_template.jinja").write_text(MARKED)
    data = str(chats(tmp_path, *[{"messages": TALK}] * 8))
    changes = {"model_name_or_path": str(folder), "dataset": data, "assistant_only_loss": True, "max_steps": 2}
    (tmp_path / "r.yaml").write_text(json.dumps(values | changes))
    assert main([str(tmp_path / "r.yaml")]) == 0
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
