"""What the pages say to type works when it is typed, and is marked where it needs what is not here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from disco_accel.config.settings import DiscoConfig, split_yaml
from tests.pages.blocks import Block, blocks_of, fault, inline_commands
from tests.pages.commands import command_fault, commands_of
from tests.pages.workspace import shell

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(p.relative_to(ROOT).as_posix() for p in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))
PAGES.remove("CHANGELOG.md")
BLOCKS = {page: blocks_of(ROOT / page, page) for page in PAGES}
RUN = [page for page in PAGES if any(b.reason is None and b.language != "text" for b in BLOCKS[page])]
# Each example is a test of its own, in test_examples.py.
RUN.remove("docs/examples/README.md")
PYTHON = "from tests.pages.given import *  # noqa\n"
"""Before each Python block: the model, rows and so on that its reader has."""


def test_every_block_says_what_it_is() -> None:
    """A language and, where it is not run, a reason that is known."""
    assert not [found for blocks in BLOCKS.values() for block in blocks if (found := fault(block))]


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_text_and_blocks_exist_with_their_options(page: str) -> None:
    """Also those that are not run: targets of make, sub-commands, modules, and each option that is named."""
    wanted = inline_commands(ROOT / page)
    wanted += [command for b in BLOCKS[page] if b.language == "sh" for command in commands_of(b.text)]
    assert not [found for command in wanted if (found := command_fault(command))]


@pytest.mark.parametrize("page", RUN)
def test_what_a_page_says_to_type_works(page: str, folder: Path, environment: dict[str, str]) -> None:
    """All of a page's blocks in order, in a shell as a reader has it. Launched scripts train from plans."""
    planned = folder / "planned.txt"
    planned.write_text("")
    for block in BLOCKS[page]:
        if block.file is not None:
            (folder / block.file).write_text(block.text)
        if block.reason is None:
            _try(block, folder, environment)
    launched = sum(b.text.count("train.py") for b in BLOCKS[page] if b.language == "sh" and b.reason is None)
    assert planned.read_text().splitlines() == ["2 0"] * launched, "steps from a plan, and others, of each launch"


def test_the_glossary_explains_words_that_other_pages_use() -> None:
    """A word that nobody uses any more goes."""
    first_cells = re.findall(r"^\| (\*\*.+?\*\*) \|", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    words = [word for cell in first_cells for word in re.findall(r"\*\*(.+?)\*\*", cell)]
    others = " ".join((ROOT / page).read_text().lower() for page in PAGES if page != "docs/glossary.md")
    text = " ".join(others.split())
    assert len(words) > 12 and not [word for word in words if word not in text]


def _try(block: Block, folder: Path, environment: dict[str, str]) -> None:
    if block.language == "yaml":
        part = folder / "part.yaml"
        part.write_text(block.text)
        assert isinstance(split_yaml(part)[1], DiscoConfig), f"{block}: has no disco_config section"
    elif block.language == "json":
        assert isinstance(json.loads(block.text), dict), block
    elif block.language == "python":
        (folder / "block.py").write_text(PYTHON + block.text)
        shell("python block.py", folder, environment, f"{block}")
    elif block.language == "sh":
        shell(block.text, folder, environment, f"{block}")
