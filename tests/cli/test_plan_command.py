"""``plan`` of models by name: budgets side by side, for people and for programs, from a config of a few kilobytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disco_accel.cli import plan_answers
from disco_accel.cli.main import main
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.files import read_memgraph, read_taskgraph
from disco_accel.measure import fused_kernels
from disco_accel.observe.plan_table import advice
from disco_accel.plan.summary import swapped_bytes
from disco_accel.sizes import parse_size, size_for_people
from disco_accel.verify.static import verify
from tests.cli.test_cli_recipe import CONFIG, write_recipe

BUDGETS = ("40KiB", "2MiB", "64MiB")
Ask = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISCO_PLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def ask(model: str, capsys: pytest.CaptureFixture[str]) -> Ask:
    def asked(*words: str, status: int = 0) -> list[dict[str, Any]]:
        assert main(["plan", "--model", model, "--seq", "32", "--gpu", "rtx4090", "--json", *words]) == status
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return asked


def test_budgets_side_by_side(ask: Ask, tmp_path: Path) -> None:
    """One object a line, nothing else; the bytes are those of the plans that are written, and the rates follow."""
    small, tight, ample = ask("--budget", ",".join(BUDGETS), "-o", str(tmp_path / "plans"))
    assert not small["fits"] and small["needed_bytes"] > 40 << 10
    assert tight["fits"] and tight["reload_bytes"] > 0 and tight["step_seconds"] >= ample["step_seconds"]
    assert ample["resident_bytes"] == ample["frozen_bytes"] and ample["hidden_at_tokens"] is None
    for found, budget in ((tight, BUDGETS[1]), (ample, BUDGETS[2])):
        folder = tmp_path / "plans" / f"1x32-{budget}"
        plan = read_memgraph(folder / "plan.json")
        verify(read_taskgraph(folder / "task.json"), plan)
        assert found["reload_bytes"] == swapped_bytes(plan, swaps_in)
        assert found["offload_bytes"] == swapped_bytes(plan, swaps_out)
        assert found["peak_bytes"] <= parse_size(budget) and "RTX 4090" in found["estimated_for"]
        assert found["tokens_per_second"] == pytest.approx(32 / found["step_seconds"])
        assert (folder / "step.png").is_file()
    busier = max(tight["copy_seconds"], tight["kernel_seconds"])
    assert busier <= tight["step_seconds"] * (1 + 1e-9)
    assert tight["limit"] == ("link" if tight["copy_seconds"] == busier else "kernels")


def test_people_get_a_table_and_a_sentence(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", model, "--seq", "32", "--gpu", "a10g", "--budget", ",".join(BUDGETS)]
    assert main(words) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert f"{model} (config.json of {model}): LoRA, 1 x 32 tokens; by estimate for an A10G" in lines[0]
    assert lines[2].split()[:2] == ["budget", "fits"]
    first, *rest = lines[4:7]
    assert first.split()[:2] == ["40KiB", "from"] and all(line.split()[1] == "yes" for line in rest)
    assert [line.split()[0] for line in rest] == list(BUDGETS[1:])
    assert "Unverified" in printed.out and "half, single, link" in printed.out
    assert "Estimated without the scratch of" in printed.out and "{" not in printed.out
    assert lines[-1].endswith(".") and "is enough" in lines[-1]


def test_the_smallest_budget_that_is_named_is_the_smallest(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a step that may have fused kernels, for a run begins without them."""
    (refused,) = ask("--budget", "1KiB", status=1)
    needed = refused["needed_bytes"]
    with monkeypatch.context() as patch:
        patch.setattr(fused_kernels, "WORTH_SECONDS", 0.0)
        assert ask("--budget", str(needed))[0]["fits"]
    assert not ask("--budget", str(needed * 99 // 100), status=1)[0]["fits"]
    curve = ask("--budget", "all")
    budgets = [each["budget_bytes"] for each in curve]
    assert budgets[0] == needed and budgets == sorted(set(budgets)) and len(budgets) == 6
    assert all(each["fits"] for each in curve)
    assert curve[-1]["resident_bytes"] == curve[-1]["frozen_bytes"] and curve[-1]["reload_bytes"] == 0
    assert curve[-1]["peak_bytes"] <= budgets[-1] < 2 * curve[-1]["peak_bytes"]


def test_lists_are_multiplied_and_a_prompt_is_one_row(ask: Ask) -> None:
    shapes = [(each["batch"], each["seq"]) for each in ask("--batch", "1,2", "--seq", "8,16", "--budget", "1GiB")]
    assert shapes == [(1, 8), (1, 16), (2, 8), (2, 16)]
    (prompt,) = ask("--task", "prefill", "--budget", "1GiB")
    assert prompt["task"] == "prefill" and prompt["recomputation"] is None
    (full,) = ask("--task", "full", "--budget", "2MiB")
    assert full["optimizer"] == "host" and full["frozen_bytes"] < full["host_updated_bytes"]
    (packed,) = ask("--quant", "nf4", "--budget", "1GiB")
    assert packed["quant"]["form"] == "nf4"


def test_the_budget_of_a_gpu_is_nine_tenths_of_its_memory(ask: Ask, tmp_path: Path, capsys: Any) -> None:
    """As ``memory_budget: auto`` of such a card; of a recipe its own budget, or its share of that memory."""
    assert ask()[0]["budget_bytes"] == int(0.9 * (24 << 30))
    recipe = write_recipe(tmp_path, "memory_budget: 50%")
    assert main(["plan", recipe, "--gpu", "h100", "--json", "--seq", "16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["budget_bytes"] == 40 << 30 and found["seq"] == 16


def test_an_equal_question_is_answered_from_disk(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is captured; another question, or a file with a fault, is planned."""
    first = ask("--budget", "2MiB,1KiB")
    with monkeypatch.context() as without:
        without.setattr(plan_answers, "outlined", lambda *_: pytest.fail("captured again"))
        assert ask("--budget", "2MiB,1KiB") == first
        for other in (["--budget", "2049KiB"], ["--gpu", "h100", "--budget", "2MiB"]):
            with pytest.raises(pytest.fail.Exception):
                ask(*other)
    for file in (tmp_path / "cache" / "answers").glob("*.json"):
        file.write_text("{}")
    assert ask("--budget", "2MiB,1KiB") == first and "made for something else" in caplog.text


def test_a_token_has_its_cache_and_loads_the_experts_that_it_needs(ask: Ask, tmp_path: Path) -> None:
    """In little memory a token's plan picks rows on the host; a batch of two has twice the cache."""
    one, two = (ask("--task", "decode", "--batch", rows, "--budget", "2MiB")[0] for rows in ("1", "2"))
    assert (one["tokens"], two["tokens"], one["task"]) == (1, 2, "decode")
    assert two["budget"]["batch"] > 1.9 * one["budget"]["batch"] > 0
    mixture = tmp_path / "mixture"
    mixture.mkdir()
    experts = {"model_type": "qwen3_moe", "num_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    (mixture / "config.json").write_text(json.dumps({**CONFIG, **experts, "head_dim": 16, "torch_dtype": "bfloat16"}))
    needed = ask("--model", str(mixture), "--task", "decode", "--budget", "1KiB", status=1)[0]["needed_bytes"]
    (tight,) = ask("--model", str(mixture), "--task", "decode", "--budget", str(2 * needed))
    assert 0 < tight["reload_bytes"] < tight["frozen_bytes"] / 4 and tight["resident_bytes"] < tight["frozen_bytes"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a recipe's file or --model"),
        (["r.yaml", "--model", "qwen3-8b"], "one of both"),
        (["r.yaml", "--task", "lora"], "--task: a recipe says what it does"),
        (["--model", "qwen3-8b", "--task", "decode", "--devices", "2"], "--devices: tokens with a static cache run on"),
        (["--model", "qwen3-8b", "--task", "prefill", "--batch", "2"], "a prompt is one row"),
        (["--model", "qwen3-8b", "--task", "full", "--quant", "nf4"], "packed weights are not trained"),
        (["--model", "qwen3-8", "--budget", "8GiB"], "did you mean qwen3-8b?"),
        (["--model", "qwen3-8b", "--budget", "8GiB,much"], "--budget: 'much' is not a size"),
        (["--model", "qwen3-8b", "--budget", "8GiB,"], "--budget: '' is not a size"),
        (["--model", "qwen3-8b", "--batch", "1,two"], "--batch: 'two' does not work"),
        (["--model", "qwen3-8b", "--seq", "1"], "--seq: '1' does not work"),
        (["--model", "qwen3-8b", "--seq", "50000"], "max_length: 50000 is more than the 40960 positions"),
        (["--model", "qwen3-8b", "--host-memory", "x"], "--host-memory: 'x' is not a size"),
        (["--model", "qwen3-8b", "--gpu", "h1"], "--gpu: 'h1' is not known"),
        (["--model", "qwen3-8b", "--gpu", "h100", "--device", "cpu"], "give one of both"),
        (["--model", "qwen3-8b", "--gpu", "this"], "no GPU is here to be measured; give one of rtx3060-12g"),
    ],
)
def test_wrong_questions_are_status_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and len(printed.err.splitlines()) == 1 and not printed.out


def test_host_memory_that_is_too_small_is_a_row_among_others(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--budget", "2MiB,1GiB", "--host-memory", "4KiB")
    assert [each["fits"] for each in ask(*words, status=2)] == [False, False]


def test_the_shipped_recipe_finds_its_shape_without_a_network() -> None:
    from disco_accel.cli.step_question import of_recipe

    step = of_recipe("configs/lora_7b.yaml")
    assert step.model.source == "preset llama-3.1-8b" and (step.rows, step.tokens) == (8, 8192)


def test_sizes_for_people_are_rounded_up() -> None:
    assert [size_for_people(size) for size in (5, 1 << 30, (1 << 30) + 1, 3 << 19)] == [
        "5B",
        "1GiB",
        "1.01GiB",
        "1.50MiB",
    ]
    assert all(parse_size(size_for_people(size)) >= size for size in range(1 << 20, 1 << 24, 77777))


def test_advice_names_the_smallest_budget_that_is_as_good() -> None:
    def row(budget: int, seconds: float) -> dict[str, Any]:
        own = {"fits": True, "budget_bytes": budget, "step_seconds": seconds, "tokens": 8, "batch": 1, "seq": 8}
        return own | {"tokens_per_second": 8 / seconds}

    said = advice([row(1 << 30, 4.0), row(2 << 30, 1.9), row(4 << 30, 1.02), row(8 << 30, 1.0)])
    assert said == ("4GiB is enough: larger ones make a step at most 2% shorter, and 2GiB halves the step of 1GiB.")


def test_the_gain_of_more_memory_is_forecast_as_plans_have_it(ask: Ask) -> None:
    """Loads that a plan for the larger budget saves, within a fifth of those in the least memory: kernels hide most
    copies here, so that plans do not look for the fewest. No plan saves more seconds than are said. Half of the loads
    and none are loaded where that is said."""
    (refused,) = ask("--budget", "1KiB", status=1)
    needed, useful = refused["needed_bytes"], refused["useful_budgets"]
    half, stays = useful["half_loads"], useful["all_stays"]
    assert needed < half < stays
    now = ask("--budget", f"{needed},{half},{(half + stays) // 2}")
    more = ask("--budget", ",".join(str(each["budget_bytes"] + each["next_gib"]["more_bytes"]) for each in now))
    least = now[0]["reload_bytes"]
    for each, larger in zip(now, more, strict=True):
        gain, saved = each["next_gib"], each["reload_bytes"] - larger["reload_bytes"]
        assert gain["more_bytes"] == each["budget_bytes"] // 10
        assert 0 < gain["loads_saved_bytes"] <= each["reload_bytes"]
        assert abs(gain["loads_saved_bytes"] - saved) <= 0.2 * least
        shorter = each["step_seconds"] - larger["step_seconds"]
        assert 0 <= gain["seconds"] <= gain["seconds_at_most"] >= shorter - 1e-12
    assert 0.3 < now[1]["reload_bytes"] / least < 0.7
    (ample,) = ask("--budget", str(stays))
    assert ample["reload_bytes"] == ample["next_gib"]["loads_saved_bytes"] == 0 and not ample["useful_budgets"]


def test_seconds_are_with_fused_kernels(
    ask: Ask, model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a run has them in the end, unless ``fuse: off`` is asked for."""
    monkeypatch.setattr(fused_kernels, "WORTH_SECONDS", 0.0)
    (joined,) = ask("--budget", "64MiB", "-o", str(tmp_path / "plan"))
    assert 0 < joined["fused"] < joined["kernels"]
    verify(read_taskgraph(tmp_path / "plan" / "task.json"), read_memgraph(tmp_path / "plan" / "plan.json"))
    assert main(["plan", "--model", model, "--seq", "32", "--gpu", "rtx4090", "--budget", "64MiB"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "fused" in line]
    assert re.fullmatch(r"Seconds are with fused kernels, \d+ of \d+; with fuse: off a step takes \d+% longer\.", line)
    monkeypatch.setenv("DISCO_FUSE", "off")
    (apart,) = ask("--budget", "64MiB")
    assert apart["fused"] == 0 and joined["kernels"] < apart["kernels"]
    assert joined["step_seconds"] < apart["step_seconds"] == joined["step_seconds_without_fused"]
    assert joined["bound_seconds"] <= 1.000001 * joined["step_seconds"]
