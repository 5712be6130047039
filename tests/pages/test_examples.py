"""docs/examples: each file is short, uses public names alone, and does what its page says, by the page's own command.

All share one tiny checkpoint and, where nothing is launched, the server that forks for commands.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import disco_accel
from tests.pages.blocks import Block, blocks_of
from tests.pages.workspace import shell

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/examples/README.md"
FILES = sorted(path for path in (ROOT / "docs" / "examples").iterdir() if path.suffix != ".md")
MAKE, *COMMANDS = (block for block in blocks_of(ROOT / PAGE, PAGE) if block.language == "sh")
PLANNED = r"disco: .*: (planned in|plan read from the cache, ready in) "
SHOWN: dict[str, tuple[str, ...]] = {
    "launch.yaml": (PLANNED, r"[1-9][0-9.]*KiB reloaded"),
    "callback.py": (PLANNED, r"steps from a plan: 2\b"),
    "plugin.py": (PLANNED, r"steps from a plan: 4\b"),
    "own_loop.py": (PLANNED, r"steps from a plan: 3\b", "losses have the same bits"),
    "recipe.yaml": (PLANNED, r"disco: 3 planned steps, 0 eager"),
    "qlora.yaml": (PLANNED, r"[1-9][0-9.]*KiB reloaded", r"disco: 3 planned steps, 0 eager"),
    "plan.sh": (r"512KiB +yes", r"128KiB +from \d", r"memory_budget: the step needs at least \d+ bytes"),
    "chain.taskgraph.json": (r'"memory_edges": [1-9]', r'"verified": true'),
    "report.py": (PLANNED, r"reload_bytes: [1-9]", r"report\.txt.*stats\.json.*trace\.json"),
    "prefill.py": (r"capturing the reading of 2 x \d+ tokens", r"first tokens: \[\d+, \d+\]"),
    "grpo.py": (PLANNED, r"'forwards_planned': 18, 'forwards_unplanned': 0"),
    "ddp.yaml": (PLANNED, r"'loss': '"),
    "deepspeed.json": (PLANNED, r"offload_param: planned instead", r"budget 512KiB on cpu", r"'loss': '"),
}
"""What an example's output must match, each somewhere."""


def example_of(block: Block) -> str:
    """The file that a command is about: the first one of docs/examples in it."""
    return re.findall(r"docs/examples/(\S+)", block.text)[0]


@pytest.fixture(scope="session")
def checkout(folder: Path, environment: dict[str, str]) -> Path:
    """A reader's folder with the checkpoint that the page makes."""
    if not (folder / "out" / "tiny").exists():
        shell(MAKE.text, folder, environment, str(MAKE))
    return folder


def test_every_example_is_short_and_on_the_page_once() -> None:
    """``train.py`` is the script of those that launch one."""
    assert {path.name: n for path in FILES if (n := len(path.read_text().splitlines())) > 40} == {}
    assert [example_of(block) for block in COMMANDS] == list(SHOWN)
    assert {path.name for path in FILES} == {*SHOWN, "train.py"}


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix != ".json"], ids=lambda path: path.name)
def test_an_example_begins_with_the_command_of_the_page(path: Path) -> None:
    """Files of JSON have no comments."""
    head = " ".join(path.read_text().splitlines()[:6])
    commands = {example_of(block): block.text.strip() for block in COMMANDS}
    assert commands.get(path.name, "python docs/examples/train.py") in head


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".py"], ids=lambda path: path.name)
def test_an_example_uses_public_names_alone(path: Path) -> None:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith("disco_accel."), f"{path.name} imports {node.module}"
            names += [alias.name for alias in node.names] if node.module == "disco_accel" else []
        elif isinstance(node, ast.Import):
            assert not [alias.name for alias in node.names if alias.name.startswith("disco_accel")]
    assert set(names) <= set(disco_accel.__all__)
    assert bool(names) == (path.name != "train.py")


@pytest.mark.parametrize("block", COMMANDS, ids=example_of)
def test_an_example_does_what_its_page_says(block: Block, checkout: Path, environment: dict[str, str]) -> None:
    if example_of(block) == "qlora.yaml" and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    output = shell(block.text, checkout, environment, str(block))
    assert not [pattern for pattern in SHOWN[example_of(block)] if not re.search(pattern, output)], output[-4000:]
    assert "eager mode" not in output
    if example_of(block) == "launch.yaml":
        alone = shell("python docs/examples/train.py", checkout, environment, str(block))
        losses = [re.findall(r"'loss': '([\d.]+)', 'grad_norm': '([\d.]+)'", text) for text in (output, alone)]
        assert losses[0] == losses[1] and len(losses[0]) == 2
        assert "disco:" not in alone
