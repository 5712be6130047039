"""docs/config.md has a row for every key of disco_config, with its default and an example that works."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from disco_accel.config.settings import DiscoConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "config.md"
KEYS = [field.name for field in dataclasses.fields(DiscoConfig)]


def rows() -> dict[str, tuple[str, str, str]]:
    """Key → default, meaning and example, the code marks taken off."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {
        key.strip("`"): (default.strip("`"), meaning, example.strip("`")) for key, default, meaning, example in cells
    }


def test_every_key_has_a_row_in_the_order_of_the_class() -> None:
    missing = [key for key in KEYS if key not in rows()]
    assert not missing, f"add a row to docs/config.md for {', '.join(missing)}: key, default, meaning, example"
    unknown = [key for key in rows() if key not in KEYS]
    assert not unknown, f"docs/config.md has rows for {', '.join(unknown)}, which are no keys; take them out"
    assert list(rows()) == KEYS, "the rows of docs/config.md are in another order than the fields of DiscoConfig"


@pytest.mark.parametrize("key", KEYS)
def test_defaults_and_examples_are_what_the_page_says(key: str) -> None:
    """An example is another value than the default, which a config takes as it stands in YAML."""
    default, meaning, example = rows()[key]
    said, shown = (yaml.safe_load(text) for text in (default, example))
    assert _config(**{key: said}) == DiscoConfig(), f"the default of {key} is not {default}"
    assert _config(**{key: shown}) != DiscoConfig(), f"the example of {key} is its default"
    assert len(meaning) > 10


def _config(**values: Any) -> DiscoConfig:
    return DiscoConfig.from_dict(values)
