"""Kept answers: equal for equal questions, and no file is trusted."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from disco_accel.plan import answers
from disco_accel.plan.answers import answer_key, load_answer, store_answer

FIGURES = {"fits": True, "step_seconds": 0.1, "host_memory": {"frozen": 5}}


def test_an_answer_comes_back_for_an_equal_question_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version, the sources and the libraries are parts of the question."""
    key = answer_key({"a": 1, "b": [2]})
    assert key == answer_key({"b": [2], "a": 1}) != answer_key({"a": 1, "b": [3]})
    assert load_answer(tmp_path, key) is None
    store_answer(tmp_path, key, FIGURES)
    assert load_answer(tmp_path, key) == FIGURES
    for name, value in (("__version__", "9"), ("_sources", lambda: "x"), ("_versions", lambda: {"torch": "1"})):
        with monkeypatch.context() as changed:
            changed.setattr(answers, name, value)
            assert answer_key({"a": 1, "b": [2]}) != key


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a JSON file"),
        (b'{"answer_to": ', "not a JSON file"),
        (b"[]", "made for something else"),
        (b'{"answer_to": "x", "figures": {}}', "made for something else"),
        (b"\x00" * (answers.MOST_BYTES + 1), "larger than"),
    ],
)
def test_a_damaged_file_is_ignored_by_name(
    content: bytes, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = answer_key({})
    store_answer(tmp_path, key, FIGURES)
    file = tmp_path / "answers" / f"{key}.json"
    file.write_bytes(content)
    assert load_answer(tmp_path, key) is None
    assert reason in caplog.text and file.name in caplog.text
    store_answer(tmp_path, key, FIGURES)
    assert load_answer(tmp_path, key) == FIGURES


def test_a_file_that_others_can_write_and_a_foreign_folder_are_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = answer_key({})
    store_answer(tmp_path, key, FIGURES)
    (tmp_path / "answers" / f"{key}.json").chmod(0o666)
    assert load_answer(tmp_path, key) is None and "others than this user" in caplog.text
    foreign = tmp_path / "foreign"
    (foreign / "answers").mkdir(parents=True)
    (foreign / "answers" / "letter.txt").write_text("mine")
    store_answer(foreign, key, FIGURES)
    assert os.listdir(foreign / "answers") == ["letter.txt"] and "letter.txt" in caplog.text


def test_writers_at_once_leave_one_whole_answer(tmp_path: Path) -> None:
    key = answer_key({})

    def write(number: int) -> dict[str, Any] | None:
        store_answer(tmp_path, key, {**FIGURES, "number": number})
        return load_answer(tmp_path, key)

    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(write, range(32)))
    assert all(each is not None and each["fits"] for each in read)
    assert len([name for name in os.listdir(tmp_path / "answers") if name.endswith(".json")]) == 1
