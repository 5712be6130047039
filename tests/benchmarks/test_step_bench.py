"""The step benchmark runs its engines in turn, checks that they do equal work, and says why one cannot run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.common import quantised
from benchmarks.common.shapes import PRESETS, frozen_bytes
from benchmarks.gpu.models import meta_llama
from benchmarks.report import pages as report
from benchmarks.step import process as step_process
from benchmarks.step import suite as step
from benchmarks.step.engines import Job
from benchmarks.step.link_trace import copied
from benchmarks.step.process import FIRST_STEPS, Worker
from benchmarks.step.table import HEADER, TITLES, judge, line, ratios
from benchmarks.step.worker import Session, first_line
from disco_accel.cli.main import main as cli
from disco_accel.errors import ConfigError

pytestmark = pytest.mark.usefixtures("forked")
JOB = Job("disco", PRESETS["tiny"], 1, 8, "float32", 4, "cpu", 1 << 20, 1e9, "timed", "")


@pytest.mark.long
def test_engines_are_compared_with_eager_in_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours has the same bits; hooks that give no gradients are found out; the table comes last."""
    words = ["--shape", "tiny", "--tokens", "16", "--rank", "4", "--budgets", "0.9", "--rounds", "2", "--device", "cpu"]
    engines = ["--engines", "in-memory,disco,streamed,accelerate", "-o", str(tmp_path / "step.json")]
    assert cli(["bench", "step", *words, *engines]) == 0
    result = json.loads((tmp_path / "step.json").read_text())
    rows = {row["engine"]: row for row in result["rows"]}
    assert not result["simulated"] and result["versions"]["torch"] == torch.__version__
    assert all(len(row["seconds"]) == 2 for row in rows.values())
    assert [rows[name]["verdict"] for name in ("in-memory", "disco", "streamed")] == ["bits"] * 3
    assert rows["accelerate"]["verdict"] == "no: 0 of 28 gradients" and not rows["accelerate"]["equal"]
    disco = rows["disco"]
    assert 0 < disco["used"] <= disco["reserved"] <= disco["budget"] < result["weights"]
    assert [name for name, row in rows.items() if row["any_plan"] is not None] == ["disco"]
    assert disco["h2d"] > 0 and rows["streamed"]["h2d"] > result["weights"]
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith("| accelerate cpu_offload |")


def _library_or_skip() -> None:
    try:
        quantised.folder_of("nf4")
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.long
def test_packed_weights_are_compared_with_the_same_form_in_memory(tmp_path: Path) -> None:
    """Their bits are those of the library's eager step, other than plain weights'; bytes are those of the packed parts;
    steps at one budget are set against plain ones."""
    _library_or_skip()
    words = ["--shape", "tiny", "--tokens", "16", "--rank", "4", "--dtype", "bfloat16", "--memory", "448KiB"]
    words += ["--rounds", "1", "--device", "cpu", "--quant", "nf4,none", "--engines", "in-memory,disco"]
    assert cli(["bench", "step", *words, "-o", str(tmp_path / "step.json")]) == 0
    result = json.loads((tmp_path / "step.json").read_text())
    eager, packed, eager_plain, plain = result["rows"]
    assert [row["quant"] for row in result["rows"]] == ["nf4", "nf4", "none", "none"]
    assert [row["verdict"] for row in result["rows"]] == ["bits"] * 4
    assert eager["losses"] == packed["losses"] != plain["losses"] == eager_plain["losses"]
    assert (
        packed["facts"]["packed"] == result["weights"] < quantised.weight_bytes(PRESETS["tiny"], "none", torch.bfloat16)
    )
    assert packed["budget"] == plain["budget"] and 0 < packed["h2d"] < plain["h2d"]
    assert "bitsandbytes" in result["versions"]
    (compared,) = ratios(result)
    assert compared.startswith("disco, nf4, 448KiB: reloads") and "of bfloat16 (" in compared
    title, _ = report.TABLES["step"](result)
    assert "nf4 weights" in title


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quantised, "APART", tmp_path)
    monkeypatch.setattr(quantised.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install torchao"):
        step.run(["--quant", "none,fp8", "--shape", "tiny"])


@pytest.mark.long
def test_zero_three_takes_the_same_steps() -> None:
    """Its gradients are large enough here that DeepSpeed's own clipping would show in the losses."""
    pytest.importorskip("deepspeed")
    words = ["--shape", "small", "--layers", "2", "--tokens", "64", "--rounds", "4", "--device", "cpu"]
    result = step.run([*words, "--engines", "in-memory,zero3"])
    zero = result["rows"][1]
    assert zero["error"] is None and zero["equal"], zero["verdict"]


@pytest.mark.parametrize(
    ("script", "limit", "why"),
    [
        ("raise SystemExit('planted')", 500, "ended with 1; its last words: planted"),
        ("import time; time.sleep(3600)", 2, "no answer within 2 s"),
        ('print(\'{"error": "ValueError: planted"}\', flush=True)', 500, "ValueError: planted"),
    ],
)
def test_a_process_that_fails_or_hangs_is_named_and_ended(
    script: str, limit: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on; its row has the reason."""
    monkeypatch.setattr(step_process, "COMMAND", ("-c", script))
    (worker,) = step.measure([dataclasses.replace(JOB, folder=str(tmp_path))], 2, apart=False, limit=limit)
    assert worker.error is not None and why in worker.error


def test_time_for_all_is_shared_and_its_end_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_process, "COMMAND", ("-c", "import time; time.sleep(3600)"))
    jobs = [dataclasses.replace(JOB, folder=str(tmp_path)) for _ in range(2)]
    workers = step.measure(jobs, 2, apart=True, limit=50, seconds=1)
    assert [worker.error for worker in workers] == ["no time was left"] * 2


def _finished(folder: Path, engine: str, gradient: float = 1.0, loss: float = 2.0, elements: int = 4) -> Worker:
    folder.mkdir()
    worker = Worker(dataclasses.replace(JOB, engine=engine, folder=str(folder)), 1)
    worker.losses, worker.seconds = [3.0, loss], [0.5]
    worker.facts = {"gradients": 1, "trainable": {"tensors": 1, "elements": elements}}
    save_file({"a": torch.full((4,), gradient)}, folder / "gradients.safetensors")
    return worker


def test_unequal_work_is_noticed(tmp_path: Path) -> None:
    """One last bit is too much for ours and rounding for others; other losses or parameters are never equal."""
    near, drifted = 1.0 + 2**-23, 2.0 + 8e-4 * 2.0
    workers = [
        _finished(tmp_path / "0", "in-memory"),
        _finished(tmp_path / "1", "disco"),
        _finished(tmp_path / "2", "disco", gradient=near),
        _finished(tmp_path / "3", "zero3", gradient=near),
        _finished(tmp_path / "4", "zero3", loss=2.05),
        _finished(tmp_path / "5", "zero3", gradient=1.1),
        _finished(tmp_path / "6", "zero3", elements=8),
        _finished(tmp_path / "7", "zero3", loss=2.0005),
        _finished(tmp_path / "8", "zero3", gradient=near, loss=drifted),
    ]
    verdicts = judge(workers, "float32")
    assert [v.equal for v in verdicts] == [True, True, False, True, False, False, False, True, False]
    assert verdicts[1].words == "bits" and verdicts[2].words.startswith("no: 0e+00, gradients 1e-07")
    assert "8 elements" in verdicts[6].words


def test_where_eager_does_not_repeat_its_bits_ours_must_be_as_near(tmp_path: Path) -> None:
    """As with flash attention's backward: three first steps of eager, and rounding of others as before."""
    workers = [
        _finished(tmp_path / "0", "in-memory"),
        _finished(tmp_path / "1", "disco", gradient=1.015),
        _finished(tmp_path / "2", "disco", gradient=1.06),
        _finished(tmp_path / "3", "zero3", gradient=1.06),
    ]
    for name, gradient in zip(FIRST_STEPS[1:], (1.01, 0.99), strict=True):
        save_file({"a": torch.full((4,), gradient)}, tmp_path / "0" / name)
    verdicts = judge(workers, "bfloat16")
    assert [v.equal for v in verdicts] == [True, True, False, False]
    assert verdicts[1].words == "to 0e+00, gradients 1e-02, eager's own 2e-02"


@pytest.mark.parametrize(("engine", "noise", "files"), [("in-memory", 0, 2), ("in-memory", 1, 3), ("streamed", 1, 1)])
def test_the_reference_runs_its_first_step_until_it_is_known_whether_it_repeats_its_bits(
    engine: str, noise: int, files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the same weights, with the gradients of one run in the update."""
    job = dataclasses.replace(JOB, engine=engine, folder=str(tmp_path))
    plain, session = Session(job), Session(job)
    real = session.engine.backward

    def noisy() -> float:
        loss: float = real()
        for parameter in session.engine.trainable.values():
            parameter.grad *= 1 + noise * 1e-3 * torch.rand(())
        return loss

    monkeypatch.setattr(session.engine, "backward", noisy)
    answer = session.step()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FIRST_STEPS[:files])
    assert answer["loss"] == plain.engine.backward() and answer["gradients"] == len(session.engine.trainable)
    plain.engine.update()
    for a, b in zip(plain.engine.trainable.values(), session.engine.trainable.values(), strict=True):
        assert torch.allclose(a, b, rtol=1e-2, atol=2e-5 if noise else 0)


def test_a_row_that_could_not_run_says_why_and_has_no_figures() -> None:
    row = {"engine": "axolotl", "budget": None, "error": "ImportError: a|b " + "x" * 300}
    cells = line(row, name_budget=False).strip("| ").split("|")
    assert [c.strip() for c in cells[1:-1]] == ["—"] * 9
    assert cells[-1].strip() == "cannot run (ImportError)"


def _figures(seconds: float, any_plan: float) -> list[str]:
    row = {"engine": "disco", "budget": None, "error": None, "seconds": [seconds], "tokens_per_second": 1.0}
    sizes = dict.fromkeys(("used", "reserved", "host", "h2d", "d2h"))
    cells = line({**row, **sizes, "bound": 0.3, "any_plan": any_plan, "verdict": "bits"}, name_budget=False)
    return [cell.strip() for cell in cells.strip("| ").split("|")]


def test_a_row_has_a_cell_for_each_heading() -> None:
    """What no plan beats stands beside max(compute, link), each over the step."""
    headings = [cell.strip() for cell in HEADER.splitlines()[0].strip("| ").split("|")]
    row = dict(zip(headings, _figures(0.5, 0.45), strict=True))
    assert (row["max(compute, link) / step"], row["lower bound / step"]) == ("60%", "90%")


def test_errors_do_not_name_folders_of_this_machine() -> None:
    error = RuntimeError("c++ -I/some/where/include -c /some/x.cpp, see a/b\nmore")
    assert first_line(error) == "RuntimeError: c++ -Iinclude -c x.cpp, see a/b"


def test_copies_are_summed_by_direction() -> None:
    events = [
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 100}},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "args": {"bytes": 20}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "args": {"bytes": 3}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "args": {"bytes": 1000}},
        {"cat": "kernel", "name": "HtoD", "args": {"bytes": 1000}},
        {"name": "process_name", "ph": "M"},
    ]
    assert copied(events) == {"h2d": 120, "d2h": 3}


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_shape_weighs_what_its_model_does(name: str) -> None:
    model = meta_llama(PRESETS[name], dtype=torch.bfloat16, attention="sdpa")
    assert frozen_bytes(PRESETS[name], 2) == sum(p.nbytes for p in model.parameters())


def test_every_engine_has_a_title() -> None:
    assert TITLES.keys() == step.ALL.keys()


@pytest.mark.parametrize(
    "words",
    [["--engines", "disco,magic"], ["--budgets", "0"], ["--layers", "0"], ["--rounds", "x"], ["--quant", "int3"]],
)
def test_wrong_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        step.main(words)
    assert words[0] in capsys.readouterr().err


def test_a_shape_that_cannot_be_is_refused() -> None:
    args = step.parser().parse_args(["--hidden", "100", "--heads", "8"])
    with pytest.raises(ConfigError, match="hidden"):
        step.shape_of(args)
