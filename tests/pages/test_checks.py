"""What checks the pages sees a page's faults."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.demo.running import Progress, beside, last_line, run
from tests.pages.blocks import blocks_of, fault, inline_commands
from tests.pages.commands import command_fault, commands_of


def page(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("```\nmake test\n```\n", "the fence says ''"),
        ("```bash\nmake test\n```\n", "the fence says 'bash'"),
        ("<!-- not run: no time -->\n```sh\nmake test\n```\n", "unknown reason, 'no time'"),
        ("<!-- not tested -->\n```sh\nmake test\n```\n", "neither"),
    ],
)
def test_a_block_without_language_or_with_an_odd_marker_is_found(tmp_path: Path, text: str, words: str) -> None:
    (block,) = blocks_of(page(tmp_path, text), "page.md")
    assert words in str(fault(block))


def test_markers_and_files_are_read_where_they_stand(tmp_path: Path) -> None:
    text = "a\n\n<!-- not run: needs a GPU -->\n```sh\nmake gpu\n```\n\n```yaml\n# a.yaml\nx: 1\n```\n\n```text\n```\n"
    gpu, file, drawing = blocks_of(page(tmp_path, text), "page.md")
    assert (gpu.reason, gpu.line, gpu.text) == ("needs a GPU", 4, "make gpu\n")
    assert (file.file, file.reason, drawing.text) == ("a.yaml", None, "")
    assert [fault(block) for block in (gpu, file, drawing)] == [None] * 3


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("make demmo", "has no demmo"),
        ("disco-accel explain x", "no sub-command explain"),
        ("disco-accel bench engines", "no benchmark engines"),
        ("disco-accel compile a.json --memery 1GiB", "no option --memery"),
        ("disco-accel bench scale --size 3", "no option --size"),
        (".venv/bin/python -m benchmarks.plans", "no module benchmarks.plans"),
    ],
)
def test_commands_that_do_not_exist_are_found(command: str, words: str) -> None:
    assert words in str(command_fault(command))


def test_commands_that_exist_are_not_complained_about(tmp_path: Path) -> None:
    text = "`DEVICE=cpu make gpu`, `make\ngpu` and `disco-accel bench scale --vertices 10` in `prose`"
    assert inline_commands(page(tmp_path, text)) == [
        "DEVICE=cpu make gpu",
        "make gpu",
        "disco-accel bench scale --vertices 10",
    ]
    block = "A=1 disco-accel compile a.json \\\n  --memory 1GiB   # a word\n\ngit status\n"
    assert commands_of(block) == ["A=1 disco-accel compile a.json --memory 1GiB", "git status"]
    assert not [
        found for c in [*inline_commands(page(tmp_path, text)), *commands_of(block)] if (found := command_fault(c))
    ]


def test_a_long_command_shows_its_latest_line_and_its_end_when_it_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    run(["bash", "-c", "printf 'loading\\n 10%%|#\\r 20%%|##\\r'; test $A = b"], log, {"A": "b"}, tmp_path)
    assert last_line(log) == "20%|##"
    with pytest.raises(SystemExit):
        run(["bash", "-c", "echo what is wrong; exit 3"], log, {}, tmp_path)
    assert "exit code 3" in (told := capsys.readouterr().err) and "what is wrong" in told


def test_a_command_beside_a_block_ends_with_it(tmp_path: Path) -> None:
    """The block runs meanwhile, its end waits, and a fault of the block ends the command."""
    log, mark = tmp_path / "log", tmp_path / "mark"
    with beside(["bash", "-c", "until test -e mark; do sleep 0.01; done; touch done"], log, {}, tmp_path):
        mark.touch()
    assert (tmp_path / "done").exists()
    with pytest.raises(ZeroDivisionError), beside(["bash", "-c", "echo $$; exec sleep 600"], log, {}, tmp_path):
        while not log.read_text().endswith("\n"):
            time.sleep(0.01)
        raise ZeroDivisionError
    assert not Path(f"/proc/{int(log.read_text())}").exists()


def test_progress_is_a_line_every_few_seconds_where_nobody_rewrites_it(capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    shown = Progress(sys.stdout)
    for second in range(11):
        shown.show(float(second), f"at {second}")
    shown.clear()
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["0", "5", "10"]
