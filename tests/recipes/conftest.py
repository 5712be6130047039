"""A tiny checkpoint, a text and a recipe to train on, made once for all tests of recipes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.demo.make_checkpoint import Shape, write_checkpoint

SHAPE = Shape(
    hidden_size=64,
    num_hidden_layers=2,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=320,
    max_position_embeddings=128,
)
TEXT = "It was a truth universally acknowledged that a small model needs a small text. " * 40


@pytest.fixture(autouse=True)
def same_threads_after():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "checkpoint"
    corpus = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    corpus.write_text(TEXT)
    write_checkpoint(directory, SHAPE, shard_size="60KB", corpus=corpus)
    return directory


@pytest.fixture
def values(checkpoint, tmp_path) -> dict:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    return {
        "model_name_or_path": str(checkpoint),
        "dataset": str(text),
        "output_dir": str(tmp_path / "out"),
        "max_steps": 4,
        "max_length": 32,
        "per_device_train_batch_size": 2,
        "lora_r": 4,
        "lora_dropout": 0.1,
        "learning_rate": 1e-2,
        "num_threads": 1,
    }
