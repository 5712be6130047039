"""Where a device is first used: the answer is kept, followed through every change, told once, and a failure refuses."""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.cli.main import main
from disco_accel.errors import ConfigError, SelfCheckFailed
from disco_accel.execute.executor import EngineOptions
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.native.host_backend import HostBackend
from disco_accel.selfcheck import first_use, self_check
from disco_accel.selfcheck import outcome as answers
from disco_accel.selfcheck.outcome import Difference, Outcome
from disco_accel.selfcheck.subject import Subject, make_subject
from disco_accel.step.compile import device_check
from disco_accel.step.compile.conductor import machine_of
from disco_accel.step.run.session import current_step
from tests.support import forkserver
from tests.support.models import random_batch, tiny_lora

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has checked nothing yet, and one intra-op thread."""
    monkeypatch.setattr(first_use, "_answers", {})
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def passed() -> Outcome:
    """Of a real check of the host device."""
    outcome = self_check.check(CPU, link_bytes=1 << 20)
    assert outcome.passed, outcome.differences
    return outcome


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch, passed: Outcome) -> list[torch.device]:
    """The host device is checked as a GPU would be: one entry for each check, which finds what ``passed`` did."""
    seen: list[torch.device] = []

    def counting(device: torch.device, *_: Any) -> Outcome:
        seen.append(device)
        return replace(passed, identity=self_check.identity_of(device))

    monkeypatch.setattr(self_check, "check", counting)
    monkeypatch.setattr(HostBackend, "needs_self_check", True)
    monkeypatch.setattr(device_check, "LINK_BYTES", 1 << 20)
    return seen


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which a weight arrives with a flipped bit, and which is really checked."""
    monkeypatch.setattr(HostBackend, "needs_self_check", True)
    monkeypatch.setattr(device_check, "LINK_BYTES", 1 << 20)

    def corrupted(device: torch.device, **options: Any) -> Subject:
        subject = make_subject(device, **options)
        vertex, data = next((v, t) for v, t in subject.clean.items() if t.numel() >= 1 << 18)
        flipped = data.clone()
        flipped[-1] ^= 0x40
        return replace(subject, clean={**subject.clean, vertex: flipped})

    monkeypatch.setattr(first_use, "make_subject", corrupted)


def config(folder: Path | None, **changes: Any) -> DiscoConfig:
    return DiscoConfig("64MiB", device="cpu", plan_cache=None if folder is None else str(folder), **changes)


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "_answers", {})


def step(folder: Path | None, **changes: Any) -> tuple[Any, torch.Tensor]:
    model = prepare(tiny_lora(layers=1), config(folder, **changes))
    loss = model(**random_batch()).loss
    loss.backward()
    return model, loss.detach()


def use(folder: Path | None, **changes: Any) -> None:
    """What making a plan begins with."""
    device_check.require_self_check(CPU, config(folder, **changes), 64 << 20)


def files(folder: Path) -> list[Path]:
    return sorted((folder / "checks").glob("*.json"))


def test_a_device_is_checked_once_and_told_in_one_line(
    tmp_path: Path, checks: list[torch.device], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "disco_accel"):
        step(tmp_path)
        use(tmp_path)
        another_process(monkeypatch)
        use(tmp_path)
    assert checks == [CPU]
    lines = [r.getMessage() for r in caplog.records if "self-check" in r.getMessage()]
    assert len(lines) == 1 and "passed" in lines[0] and "bit for bit" in lines[0] and "GB/s" in lines[0]
    assert [oct(p.stat().st_mode & 0o777) for p in (*files(tmp_path), tmp_path / "checks")] == ["0o600", "0o700"]


def test_plans_are_compared_on_the_link_that_was_measured(
    tmp_path: Path, checks: list[torch.device], passed: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"h2d": 12.34e9, "d2h": 11.0e9, "both": 10e9}
    monkeypatch.setitem(passed.figures, "link", rates)
    model, loss = step(tmp_path)
    another_process(monkeypatch)
    assert device_check.require_self_check(CPU, config(tmp_path), 64 << 20) == rates and checks == [CPU]
    made = current_step(model)
    assert made is not None and made.settings.machine is not None
    link = made.settings.machine.link
    assert (link(TO_DEVICE).bandwidth, link(TO_HOST).bandwidth) == (12e9, 11e9) and not made.settings.machine.joint
    assert torch.equal(step(None, self_check="off")[1], loss)


def test_a_link_that_takes_turns_is_one_link_for_both_directions() -> None:
    machine = machine_of(EngineOptions(), {"h2d": 12e9, "d2h": 11e9, "both": 5.5e9})
    assert machine is not None and machine.joint == (("h2d", "d2h"),)
    assert {machine.link(route).bandwidth for route in (TO_DEVICE, TO_HOST)} == {11e9}
    assert machine_of(EngineOptions(), {"copy": 8e9}) is None
    throttled = machine_of(EngineOptions(link_bandwidth=3e8), {"h2d": 12e9, "d2h": 11e9})
    assert throttled is not None and throttled.link(TO_DEVICE).bandwidth == 3e8


def test_each_device_that_shares_a_step_is_checked_once(checks: list[torch.device]) -> None:
    for gpus in ((0, 1), (1, 2)):
        first = torch.device("cpu", gpus[0])
        device_check.require_self_check(first, config(None), 64 << 20, gpus)
    assert checks == [torch.device("cpu", index) for index in (0, 1, 2)]


def test_the_host_device_is_not_checked_and_off_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("checked")

    monkeypatch.setattr(self_check, "check", never)
    use(tmp_path)
    monkeypatch.setattr(HostBackend, "needs_self_check", True)
    use(tmp_path, self_check="off")
    with pytest.raises(AssertionError, match="checked"):
        use(tmp_path)


@pytest.mark.parametrize("given", ["on", 1, True, None, ["auto"]])
def test_the_key_takes_auto_and_off_alone(given: Any) -> None:
    assert DiscoConfig(self_check=False).self_check == "off", "as YAML 1.1 reads off"
    with pytest.raises(ConfigError, match=r"self_check: .*use auto or off"):
        DiscoConfig(self_check=given)


@pytest.mark.parametrize("changed", ["driver", "torch", "uuid", "sources", "allocator"])
def test_what_changes_between_check_and_use_asks_for_another(
    changed: str, tmp_path: Path, checks: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another driver or PyTorch, another card behind the same number, other sources: each has an answer of its own."""
    use(tmp_path)
    real = answers.identity_of
    for module in (first_use, self_check):
        monkeypatch.setattr(module, "identity_of", lambda device: {**real(device), changed: "another"})
    another_process(monkeypatch)
    use(tmp_path)
    assert len(checks) == 2 and len(files(tmp_path)) == 2
    another_process(monkeypatch)
    use(tmp_path)
    assert len(checks) == 2


def test_a_folder_that_was_removed_or_renamed_for_another_device_asks_for_a_check(
    tmp_path: Path, checks: list[torch.device], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(tmp_path)
    (kept,) = files(tmp_path)
    content = kept.read_bytes()
    kept.unlink()
    another_process(monkeypatch)
    use(tmp_path)
    assert len(checks) == 2
    (kept,) = files(tmp_path)
    real = answers.identity_of
    for module in (first_use, self_check):
        monkeypatch.setattr(module, "identity_of", lambda device: {**real(device), "uuid": "of another machine"})
    other = kept.with_name(answers.key_of(first_use.identity_of(CPU)) + ".json")
    other.write_bytes(content)
    other.chmod(0o600)
    another_process(monkeypatch)
    use(tmp_path)
    assert len(checks) == 3 and "made for something else; checked again" in caplog.text


def test_any_flipped_bit_makes_the_file_as_good_as_absent(tmp_path: Path) -> None:
    outcome = Outcome({"device": "a device"}, figures={"link": {"h2d": 2.5e10}}, seconds=1.5)
    folder, key = str(tmp_path), answers.key_of(outcome.identity)
    assert answers.store(folder, key, outcome) and answers.kept_outcome(folder, key)
    path = answers.answer_path(folder, key)
    sound = path.read_bytes()
    for position in range(len(sound)):
        damaged = bytearray(sound)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        assert not answers.kept_outcome(folder, key), f"byte {position} is {damaged[position : position + 1]!r}"
    for short in (b"", sound[:-1], sound + b"\n", b"[]", b"{}", b"\xff", b"1" * (answers.MOST_BYTES + 1)):
        path.write_bytes(short)
        assert not answers.kept_outcome(folder, key)
    path.write_bytes(sound)
    assert answers.kept_outcome(folder, key)


def test_a_file_that_others_can_write_or_that_is_a_link_does_not_count(tmp_path: Path) -> None:
    outcome = Outcome({"device": "a device"})
    folder, key = str(tmp_path), answers.key_of(outcome.identity)
    answers.store(folder, key, outcome)
    path = answers.answer_path(folder, key)
    path.chmod(0o666)
    assert not answers.kept_outcome(folder, key)
    path.chmod(0o600)
    aside = path.rename(tmp_path / "aside.json")
    path.symlink_to(aside)
    assert not answers.kept_outcome(folder, key)


def test_a_damaged_file_is_told_and_replaced(
    tmp_path: Path, checks: list[torch.device], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(tmp_path)
    (kept,) = files(tmp_path)
    sound = kept.read_bytes()
    kept.write_bytes(sound[: len(sound) // 2])
    another_process(monkeypatch)
    use(tmp_path)
    assert len(checks) == 2 and f"{kept}: " in caplog.text and "checked again" in caplog.text
    another_process(monkeypatch)
    use(tmp_path)
    assert len(checks) == 2


def test_a_failure_refuses_with_what_differed_and_a_file(tmp_path: Path, broken: None) -> None:
    """At each step, with the same type; nothing is kept as passed, and the file has all that a report needs."""
    model = prepare(tiny_lora(layers=1), config(tmp_path))
    for _ in range(2):
        with pytest.raises(SelfCheckFailed, match=r"of the norm.*attach .*json to a bug report.*on_unsupported: eager"):
            model(**random_batch())
    assert files(tmp_path) == []
    (report,) = tmp_path.glob("failed-self-check-*.json")
    found = json.loads(report.read_text())
    assert found["passed"] is False and found["platform"]
    assert {"device", "torch", "sources", "disco_accel"} <= found["identity"].keys()
    first = found["differences"][0]
    assert first["expected"] != first["got"] and first["apart"] and first["part"].startswith("steps as planned")
    assert report.stat().st_mode & 0o777 == 0o600


def test_a_failure_trains_eagerly_where_that_is_asked_for_and_is_told_once(
    tmp_path: Path, broken: None, caplog: pytest.LogCaptureFixture
) -> None:
    eager = tiny_lora(layers=1)(**random_batch()).loss.detach()
    model, loss = step(tmp_path, on_unsupported="eager")
    model(**random_batch()).loss.backward()
    assert torch.equal(loss, eager) and stats(model)["steps_eager"] == 2
    assert caplog.text.count("self-check: planned steps on") == 1


def test_a_failure_without_a_plan_cache_names_a_file_all_the_same(tmp_path: Path, broken: None) -> None:
    with pytest.raises(SelfCheckFailed) as raised:
        step(None)
    assert raised.value.report is not None and str(raised.value.report) in str(raised.value)
    assert json.loads(raised.value.report.read_text())["differences"]
    raised.value.report.unlink()


def test_a_folder_that_cannot_be_written_is_told_and_training_goes_on(
    tmp_path: Path, checks: list[torch.device], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checks").write_text("a file")
    use(tmp_path)
    assert checks == [CPU] and "is not a folder of this user's own" in caplog.text


def test_a_kept_answer_is_told_with_what_has_changed_since(
    tmp_path: Path, checks: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For ``doctor``, which checks nothing by itself."""
    monkeypatch.setenv("DISCO_PLAN_CACHE", str(tmp_path))
    assert first_use.kept_answers([CPU]) == [{}]
    use(tmp_path)
    (kept,) = files(tmp_path)
    (answer,) = first_use.kept_answers([CPU])
    assert answer["when"] == kept.stat().st_mtime and answer["changed"] == []
    assert answer["figures"]["compared"] == "bits"
    real = answers.identity_of
    monkeypatch.setattr(first_use, "identity_of", lambda device: {**real(device), "torch": "another"})
    assert first_use.kept_answers([CPU])[0]["changed"] == ["torch"]
    monkeypatch.setattr(first_use, "identity_of", lambda device: {**real(device), "uuid": "of another machine"})
    assert first_use.kept_answers([CPU]) == [{}]
    monkeypatch.undo()
    monkeypatch.setenv("DISCO_PLAN_CACHE", str(tmp_path))
    kept.write_bytes(kept.read_bytes()[:-9])
    assert first_use.kept_answers([CPU]) == [{}] and len(checks) == 1


PROGRAM = """
import sys, torch
torch.set_num_threads(1)
from disco_accel.selfcheck import first_use
first_use.require_passed(torch.device("cpu"), sys.argv[1], link_bytes=1 << 20)
print("passed")
"""


def test_processes_that_check_at_the_same_time_do_not_hurt_each_other(tmp_path: Path) -> None:
    command_line = forkserver.program(PROGRAM, tmp_path.parent, str(tmp_path))
    running = [
        subprocess.Popen(command_line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for process in running:
        out, errors = process.communicate(timeout=1500)
        assert process.returncode == 0 and out == "passed\n" and "checked again" not in errors, errors
    (kept,) = files(tmp_path)
    assert answers.kept_outcome(str(tmp_path), kept.stem)


def test_doctor_checks_again_and_ends_with_1_where_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A device that has passed before and fails now has to pass again before it is used."""
    monkeypatch.setenv("DISCO_PLAN_CACHE", str(tmp_path))
    monkeypatch.setattr("disco_accel.observe.doctor._COPY_BYTES", 1 << 20)
    assert main(["doctor", "--json", "--selftest", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["selftest"]["passed"] and found["problems"] == []
    assert len(files(tmp_path)) == 1
    real = self_check.check

    def failing(device: torch.device) -> Outcome:
        outcome = real(device)
        outcome.differences.append(Difference("planted", "a loss", "1", "2"))
        return outcome

    monkeypatch.setattr(self_check, "check", failing)
    assert main(["doctor", "--json", "--selftest", "--device", "cpu"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert "planted: a loss is 2 instead of 1" in found["problems"][0] and not found["selftest"]["passed"]
    assert files(tmp_path) == []
