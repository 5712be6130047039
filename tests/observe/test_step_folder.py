"""A folder is read back as it was written, or refused with the name of the file and the way out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from disco_accel.errors import ConfigError
from disco_accel.observe.report import write_report
from disco_accel.observe.step_facts import _StepFacts
from disco_accel.observe.step_folder import _Step, figures_of, read_step
from disco_accel.observe.step_model import step_model
from tests.observe import traced_step as small

STATS = {
    "budget": {"total": 4096, "arena": 2048, "adapters": 1024, "gradients": 512, "optimizer": 512, "batch": 0},
    **{"arena_bytes": 2048, "resident_weight_bytes": 256, "kernels": 4, "reload_bytes": 768, "offload_bytes": 256},
    **{"step_seconds": 8.0, "bound_seconds": 6.0, "compute_seconds": 6.0},
}
FACTS = _StepFacts({small.W0: "layers.0.weight"}, {small.A: "layers.0"}, {small.C: small.B}, {small.B: 3})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("step")
    write_report(folder, small.plan(), small.events(), STATS, facts=FACTS)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return shutil.copytree(written, tmp_path / "step")


def test_a_step_is_read_as_it_was_written(folder: Path) -> None:
    step = read_step(folder)
    assert step.plan == small.plan() and step.facts == FACTS and step.source == "measured"
    read = {(e.vertex, e.lane, e.issue, e.start, e.end, e.bytes) for e in step.events}
    assert read == {(e.vertex, e.lane, e.issue, e.start, e.end, e.bytes) for e in small.events()}
    assert step.figures.total == 4096 and step.figures.outside == {"adapters": 1024, "gradients": 512, "optimizer": 512}


def test_the_model_has_the_plan_s_figures(folder: Path) -> None:
    model = step_model(read_step(folder))
    json.dumps(model)
    assert model["finish"] == 8_000_000_000 and [lane["busy"] for lane in model["lanes"]] == [6e9, 5e9, 2e9]
    assert model["memory"][0]["peak"] == 1536
    assert [model["texts"][model["values"][m["value"]]] for m in model["moved"]] == ["w1 1", "mm 2 of layers.0"]
    said = " ".join(model["headline"]["words"])
    assert "measured" in said and "1.333 times" in said and "more memory" not in said
    assert ["Computed again", "1 kernels repeat an earlier one: 1 s."] in model["choices"]
    assert ["Fused", "1 kernels compute 3 calls."] in model["choices"]


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        ([1 << 30, 3 << 20, 0.002], "With 1GiB more memory it would load about 3MiB less and take about 2 ms less, by"),
        ([1 << 30, 0, 0.0], ""),
        (["1GiB", 3 << 20, 0.002], ""),
        (None, ""),
    ],
)
def test_the_gain_of_more_memory_is_told_where_there_is_one(gain: list[object] | None, said: str) -> None:
    """From figures of a file, which may hold anything."""
    names = ("more_bytes", "loads_saved_bytes", "seconds")
    own = {"next_gib": gain if gain is None else dict(zip(names, gain, strict=True))}
    model = step_model(_Step(small.plan(), small.events(), FACTS, "measured", figures_of({**STATS, **own})))
    words = " ".join(model["headline"]["words"])
    assert said in words and ("by estimate" in words) == bool(said)


def damaged(folder: Path, name: str, change) -> None:
    path = folder / name
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def rows(data):
    return [row for row in data["traceEvents"] if row["ph"] == "X"]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("trace.json", lambda d: d.pop("otherData"), "version: expected 1, got None"),
        ("trace.json", lambda d: d["otherData"].update(version=7), "version: expected 1, got 7"),
        ("trace.json", lambda d: d["otherData"].update(source="dreamt"), "expected measured or simulated"),
        ("trace.json", lambda d: d["otherData"].update(names=[["a", 1]]), "names: expected pairs"),
        ("trace.json", lambda d: rows(d)[0].update(ts="soon"), "ts: expected microseconds"),
        ("trace.json", lambda d: rows(d)[0].update(tid=99), "tid: is the number of no lane"),
        ("trace.json", lambda d: rows(d)[0]["args"].update(vertex=77), "vertex 77 is none of plan.json's"),
        ("trace.json", lambda d: d["traceEvents"].remove(rows(d)[0]), "of plan.json has no row"),
        ("stats.json", lambda d: d.pop("budget"), "budget: expected an object"),
        ("stats.json", lambda d: d["budget"].pop("arena"), "budget: arena: missing"),
        ("stats.json", lambda d: d["budget"].update(total=-1), "budget: total: expected bytes, got -1"),
        ("stats.json", lambda d: d.update(step_seconds="1"), "step_seconds: expected seconds"),
        ("plan.json", lambda d: d.update(version=9), "version: expected 1 or 3, got 9"),
    ],
)
def test_a_damaged_file_is_named_with_the_fix(folder: Path, name: str, change, words: str) -> None:
    damaged(folder, name, change)
    with pytest.raises(ConfigError) as refused:
        read_step(folder)
    assert str(folder / name) in str(refused.value) and words in str(refused.value)
    assert "write the folder again, with report_dir or disco-accel plan -o" in str(refused.value)


@pytest.mark.parametrize("name", ["plan.json", "trace.json", "stats.json"])
def test_a_file_that_is_missing_or_cut_is_named(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=f"{name}: not a JSON file"):
        read_step(folder)
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=f"{name}: is not there; write the folder again"):
        read_step(folder)


def test_a_folder_that_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        read_step(tmp_path / "nothing")
