"""Who of several processes says what on stderr."""

from __future__ import annotations

import logging

import pytest

from disco_accel.observe.log_to_stderr import say, say_everywhere, show_messages


@pytest.mark.parametrize("rank", ["0", "1"])
def test_what_a_machine_waits_for_is_said_by_each_rank_and_progress_by_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str
) -> None:
    ours = logging.getLogger("disco_accel")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(ours, "level", logging.NOTSET)
    show_messages()
    say("progress")
    ours.info("a line")
    say_everywhere("waiting")
    ours.warning("wrong")
    shown = capsys.readouterr().err.splitlines()
    expected = ["disco: progress", "disco: a line", "disco: waiting", "disco: wrong"]
    assert shown == (expected if rank == "0" else expected[2:])
    show_messages(quiet=True)
    say_everywhere("waiting")
    assert capsys.readouterr().err == ""
