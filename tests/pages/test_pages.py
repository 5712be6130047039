"""What the pages say to type works when it is typed, and is marked where it needs what is not here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from disco_accel.config.settings import DiscoConfig, split_yaml
from tests.pages import workspace
from tests.pages.blocks import Block, blocks_of, fault, inline_commands
from tests.pages.commands import command_fault, commands_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(p.relative_to(ROOT).as_posix() for p in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")))
PAGES.remove("CHANGELOG.md")
BLOCKS = {page: blocks_of(ROOT / page, page) for page in PAGES}
RUN = [page for page in PAGES if any(b.reason is None and b.language != "text" for b in BLOCKS[page])]
PYTHON = "from tests.pages.given import *  # noqa\n"
"""Before each Python block: the model, rows and so on that its reader has."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder, shared by all pages: pages add files to it, as a reader does."""
    made = tmp_path_factory.mktemp("reader")
    workspace.make(made)
    return made


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What a shell in the folder has: the environment's programs on PATH, no network, no GPU."""
    served = tmp_path_factory.mktemp("served")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DISCO_", "ACCELERATE_"))}
    clean |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "tests/pages/forkserver.py"), str(served)]
    with subprocess.Popen(command, env=clean, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert any(line == "ready\n" for line in server.stdout), "the server that forks for commands ended"
        path = os.pathsep.join([str(served / "bin"), str(Path(sys.executable).parent), clean["PATH"]])
        yield clean | {"PATH": path}
        server.kill()


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


def _try(block: Block, folder: Path, environment: dict[str, str]) -> None:
    if block.language == "yaml":
        part = folder / "part.yaml"
        part.write_text(block.text)
        assert isinstance(split_yaml(part)[1], DiscoConfig), f"{block}: has no disco_config section"
    elif block.language == "json":
        assert isinstance(json.loads(block.text), dict), block
    elif block.language == "python":
        (folder / "block.py").write_text(PYTHON + block.text)
        _shell("python block.py", block, folder, environment)
    elif block.language == "sh":
        _shell(block.text, block, folder, environment)


def _shell(text: str, block: Block, folder: Path, environment: dict[str, str]) -> None:
    shell = shutil.which("bash") or "/bin/bash"
    done = subprocess.run(
        [shell, "-eux", "-o", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{block}: ended with {done.returncode}\n{text}\n{done.stdout[-4000:]}"
