"""``disco-accel plan`` and a run ask for the same budget: scratch of ops, adapters, optimizer and batch are counted."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prepare
from disco_accel.capture.step import capture_step
from disco_accel.cli.main import main
from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.recompute_again import RECOMPUTE_AGAIN
from disco_accel.integrate.hf.tracing import hf_contexts
from disco_accel.measure.costs import Estimated
from disco_accel.recipes.lora import main as train
from disco_accel.recipes.outline import Outline
from disco_accel.step.compile.pipeline import STEP_PASSES, PlannerSettings, plan_step, with_costs
from tests.support.models import TEN_FAMILIES, family_lora, random_batch

KINDS = list(itertools.product((torch.float32, torch.bfloat16), (False, True)))
ALL = list(itertools.product(TEN_FAMILIES, KINDS))
CASES = ALL if os.environ.get("DISCO_LONG_TESTS") else [ALL[4 * i + i % 4] for i in range(len(TEN_FAMILIES))]
"""Each family once, dtype and checkpointing in turn; all of them where the environment asks for it."""


def one_layer(family: str) -> dict[str, Any]:
    return {"n_layer": 1} if family == "gpt2" else {"num_hidden_layers": 1}


@pytest.mark.parametrize(("family", "kind"), CASES, ids=str)
def test_the_outline_of_every_family_needs_what_its_run_needs(family: str, kind: tuple[torch.dtype, bool]) -> None:
    """Within 1 %; the model of the outline is on ``meta``."""
    dtype, checkpointing = kind
    keys = {"dtype": dtype, "checkpointing": checkpointing, **one_layer(family)}
    batch = random_batch(length=20)
    with torch.device("meta"):
        meta = family_lora(family, **keys)
    outline = Outline(capture_step(meta, batch, contexts=hf_contexts(meta, batch)), meta, batch)
    step, costs = with_costs(outline.captured, Estimated("cpu"), (*STEP_PASSES, RECOMPUTE_AGAIN))
    assert costs.without_scratch == 0 and costs.note == ""
    with pytest.raises(BudgetTooSmall) as planned:
        budget = outline.budget(4096).split(costs.workspaces, in_blocks=costs.in_blocks)
        plan_step(step, budget, PlannerSettings("build"))
    config = DiscoConfig(memory_budget=4096, device="cpu", planner="build", plan_cache=None)
    with pytest.raises(BudgetTooSmall) as run:
        prepare(family_lora(family, **keys), config)(**batch)
    assert planned.value.needed == pytest.approx(run.value.needed, rel=0.01)


def test_a_recipe_that_plan_accepts_is_not_refused_by_train(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the config file alone, ``plan`` names the number of bytes that ``train`` names with the weights at hand."""
    keys = {**values, "output_dir": str(tmp_path / "out")}
    keys["disco_config"] = {"memory_budget": "30KiB", "compute_threads": 1, "device": "cpu", "plan_cache": None}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(keys))
    assert main(["plan", "--json", str(recipe), "--device", "cpu"]) == 1
    refusal = json.loads(capsys.readouterr().out)
    assert refusal["without_scratch_of"] == 0
    assert train([str(recipe)]) == 2
    needed = int(capsys.readouterr().err.split("at least ")[1].split(" ")[0])
    assert refusal["needed_bytes"] == pytest.approx(needed, rel=0.01)


def test_what_only_a_gpu_can_tell_is_said(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(values))
    assert main(["plan", "--json", str(recipe), "--memory", "1GiB"]) == 0
    said = capsys.readouterr()
    figures = json.loads(said.out)
    assert figures["without_scratch_of"] >= figures["kernels"] > 100
    assert f"without the scratch of {figures['without_scratch_of']} ops" in said.err and "only a GPU" in said.err


def test_ops_too_large_to_be_tried_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from disco_accel.measure import estimated_scratch

    monkeypatch.setattr(estimated_scratch, "_LARGEST", 6000)
    model, batch = family_lora("llama", **one_layer("llama")), random_batch(length=20)
    graph = capture_step(model, batch, contexts=hf_contexts(model, batch)).graph
    costs = Estimated("cpu").of(graph)
    assert 0 < costs.without_scratch < len(graph.ops)
    assert costs.note == f"without the scratch of {costs.without_scratch} ops, which are too large to be tried here"
