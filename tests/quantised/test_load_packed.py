"""Packed weights go into the host arena one by one: with the bits of ``from_pretrained``, each of them once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.demo.make_checkpoint import Shape, write_checkpoint
from tests.quantised.children import environment, lines_of

# Small weights and many: bitsandbytes takes some 25 bytes a number while it packs one.
SHAPE = Shape(
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=32,
    num_attention_heads=8,
    num_key_value_heads=8,
    vocab_size=1024,
)
Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Lines]:
    """What a process that packs, and one that reads what the first has saved, tell."""
    environment()
    at = tmp_path_factory.mktemp("packed")
    plain, packed, scratch = at / "plain", at / "packed", at / "scratch"
    write_checkpoint(plain, SHAPE, shard_size="24MB")
    scratch.mkdir()
    return {way: lines_of("load_packed.py", way, *map(str, (plain, packed, scratch))) for way in ("make", "read")}


@pytest.mark.parametrize("form", ["NF4, double", "torchao int8"])
@pytest.mark.parametrize("way", ["make", "read"])
def test_loading_peaks_at_the_packed_weights_ten_percent_and_a_shard(
    told: dict[str, Lines], way: str, form: str
) -> None:
    """Resident memory at its highest, mapped files included; ``prepare`` leaves the weights where they are."""
    (line,) = (line for line in told[way] if line.get("measured") == form)
    assert line["shard"] < line["packed"] / 2
    assert line["packed"] <= line["peak"] <= 1.1 * line["packed"] + line["shard"]
    assert line["kept"]


@pytest.mark.parametrize("way", ["make", "read"])
def test_every_part_of_every_form_is_that_of_from_pretrained_and_in_the_arena(told: dict[str, Lines], way: str) -> None:
    """Also classes of layers, config and mode; models with tied weights and with inputs first."""
    lines = [line for line in told[way] if "model" in line]
    assert [line for line in lines if line["different"] or line["outside"]] == []
    assert len(lines) == {"make": 13, "read": 12}[way]


@pytest.mark.parametrize("way", ["make", "read"])
def test_a_planned_step_of_what_was_loaded_is_eagers(told: dict[str, Lines], way: str) -> None:
    steps = [line for line in told[way] if "step" in line]
    assert steps and [line for line in steps if not line["equal"]] == []


def test_a_killed_load_leaves_nothing_and_the_next_has_the_same_bits(told: dict[str, Lines]) -> None:
    """Killed while it reads the first tensor, one in the middle, the last; bitsandbytes' and torchao's files."""
    lines = [line for line in told["read"] if "killed" in line]
    assert len(lines) == 6
    assert [line for line in lines if line["left"] or line["different"]] == []


def test_files_that_end_or_hold_another_form_are_refused_by_name(told: dict[str, Lines]) -> None:
    ended, mixed = (line["refused"] for line in told["read"] if "refused" in line)
    assert "safetensors: tensor " in ended and "bytes too early" in ended
    assert "proj.weight is a Parameter of shape" in mixed and "are not of one form" in mixed
    assert Path(ended.split(": tensor")[0]).suffix == ".safetensors"
