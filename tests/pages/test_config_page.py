"""docs/config.md and configs/disco.yaml have every key of disco_config with its default; the page also an example."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from disco_accel.config.settings import DiscoConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "config.md"
FILE = ROOT / "configs" / "disco.yaml"
KEYS = [field.name for field in dataclasses.fields(DiscoConfig)]


def rows() -> dict[str, tuple[str, str, str, str]]:
    """Key → default, meaning, reason to change it and example, the code marks taken off."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {
        key.strip("`"): (default.strip("`"), meaning, reason, example.strip("`"))
        for key, default, meaning, reason, example in cells
    }


def test_every_key_has_a_row_in_the_order_of_the_class() -> None:
    missing = [key for key in KEYS if key not in rows()]
    assert not missing, f"add a row to docs/config.md for {', '.join(missing)}, with all five cells"
    unknown = [key for key in rows() if key not in KEYS]
    assert not unknown, f"docs/config.md has rows for {', '.join(unknown)}, which are no keys; take them out"
    assert list(rows()) == KEYS, "the rows of docs/config.md are in another order than the fields of DiscoConfig"


@pytest.mark.parametrize("key", KEYS)
def test_defaults_and_examples_are_what_the_page_says(key: str) -> None:
    """An example is another value than the default, which a config takes as it stands in YAML."""
    default, meaning, reason, example = rows()[key]
    said, shown = (yaml.safe_load(text) for text in (default, example))
    assert _config(**{key: said}) == DiscoConfig(), f"the default of {key} is not {default}"
    assert _config(**{key: shown}) != DiscoConfig(), f"the example of {key} is its default"
    assert len(meaning) > 10 and len(reason) > 10


def test_the_example_file_has_every_key_with_a_comment_that_says_its_default() -> None:
    section = FILE.read_text().split("disco_config:\n")[1]
    lines = [re.fullmatch(r"  (\w+): \S.*?\s+# default (\S+)\. (.{20,})", line) for line in section.splitlines()]
    assert all(lines), f"a line of {FILE.name} is not 'key: value  # default VALUE. What it is'"
    defaults = {line[1]: yaml.safe_load(line[2]) for line in lines if line}
    assert list(defaults) == KEYS and _config(**defaults) == DiscoConfig()
    assert DiscoConfig.from_yaml(FILE) != DiscoConfig()


def _config(**values: Any) -> DiscoConfig:
    return DiscoConfig.from_dict(values)
