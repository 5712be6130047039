"""Text becomes rows of exactly the asked length, with loss where it belongs and nothing lost in between."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from disco_accel.errors import ConfigError
from disco_accel.recipes.corpus import IGNORED, build_blocks


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint)


def jsonl(path, *records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_packed_rows_are_the_text_in_order(tmp_path, tokenizer):
    text = "A small model needs a small text. " * 20
    (tmp_path / "a.txt").write_text(text)
    blocks = build_blocks(tmp_path / "a.txt", tokenizer, max_length=16)
    ids = blocks.columns["input_ids"].flatten().tolist()
    whole = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert ids == whole[: len(ids)]
    assert len(whole) - len(ids) < 16, "only what does not fill a row is left out"
    assert text.startswith(tokenizer.decode(ids[1:]))
    assert "attention_mask" not in blocks[0], "a mask without padding would cost the fast attention kernel"


@settings(max_examples=25, deadline=None)
@given(words=st.lists(st.integers(1, 30), min_size=1, max_size=8), length=st.integers(2, 40), packing=st.booleans())
def test_every_row_has_the_asked_length_and_labels_repeat_the_ids(tmp_path_factory, tokenizer, words, length, packing):
    path = tmp_path_factory.mktemp("data") / "d.jsonl"
    jsonl(path, *[{"prompt": "ask " * n, "completion": " answer" * n} for n in words])
    try:
        blocks = build_blocks(path, tokenizer, max_length=length, packing=packing)
    except ConfigError as error:
        assert "max_length" in str(error)
        return
    for row in range(len(blocks)):
        ids, labels = blocks[row]["input_ids"], blocks[row]["labels"]
        assert len(ids) == len(labels) == length
        assert bool(((labels == ids) | (labels == IGNORED)).all())


def test_only_completions_carry_loss_unless_asked_otherwise(tmp_path, tokenizer):
    path = jsonl(tmp_path / "d.jsonl", {"prompt": "a small model", "completion": " needs a small text"})
    tokens = tokenizer(" needs a small text", add_special_tokens=False)["input_ids"]
    labels = build_blocks(path, tokenizer, max_length=64, packing=False).columns["labels"][0]
    assert labels[labels != IGNORED].tolist() == [*tokens, tokenizer.eos_token_id]
    every = build_blocks(path, tokenizer, max_length=64, packing=False, completion_only_loss=False)
    assert int((every.columns["labels"] != IGNORED).sum()) > len(tokens) + 1


def test_padding_is_masked_and_carries_no_loss(tmp_path, tokenizer):
    blocks = build_blocks(jsonl(tmp_path / "d.jsonl", {"text": "short"}), tokenizer, max_length=32, packing=False)
    mask, labels = blocks.columns["attention_mask"][0], blocks.columns["labels"][0]
    assert 0 < int(mask.sum()) < 32
    assert bool((labels[mask == 0] == IGNORED).all())


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "", ["is empty"]),
        ("a.txt", " \n\n", ["is empty"]),
        ("a.jsonl", "\n", ["is empty"]),
        ("a.jsonl", '{"text": "fine"}\n{"prompt": 1}\n', ["line 2", "completion"]),
        ("a.jsonl", '{"text": "fine"}\n\n{oops\n', ["line 3", "not JSON"]),
        ("a.jsonl", '["text"]\n', ["line 1"]),
        ("a.txt", "too short", ["max_length: 512"]),
    ],
)
def test_a_useless_file_is_named_with_the_reason(tmp_path, tokenizer, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        build_blocks(tmp_path / name, tokenizer, max_length=512)
    for word in ["dataset", name, *words]:
        assert word in str(caught.value)


def test_prompts_that_fill_every_row_leave_nothing_to_learn(tmp_path, tokenizer):
    path = jsonl(tmp_path / "d.jsonl", {"prompt": "ask " * 100, "completion": " answer"})
    with pytest.raises(ConfigError, match="no token carries loss"):
        build_blocks(path, tokenizer, max_length=8, packing=False)


def test_a_missing_or_binary_file_is_named(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match=r"none\.txt: no such file"):
        build_blocks(tmp_path / "none.txt", tokenizer, max_length=8)
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        build_blocks(tmp_path / "b.txt", tokenizer, max_length=8)
