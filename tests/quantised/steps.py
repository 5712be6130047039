"""Trains quantised models in a process of its own, where the libraries are: ``steps.py CASES``, a list as JSON.

A case is ``{"form", "family", "checkpointing"}``, perhaps with ``"layers"``. Prints one line of JSON for each: what
came of three budgets.
"""

import json
import sys
import traceback
from typing import Any

import torch

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.capture.captured_step import InputSource
from disco_accel.capture.parts import frozen_parts
from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.run.session import Session, current_step
from disco_accel.verify.static import verify
from tests.support.models import family_lora, random_batch
from tests.support.quantised import FORMS, bnb_experts

STEPS, ACCUMULATE = 2, 2
torch.set_num_threads(1)
SIZES = {"hidden_size": 128, "intermediate_size": 256}
GPT2_SIZES = {"n_embd": 128}


def model_of(case: dict[str, Any]) -> torch.nn.Module:
    experts = case["form"] == "bitsandbytes NF4 experts"
    sizes = {**SIZES, "moe_intermediate_size": 128} if experts else SIZES
    return family_lora(
        case["family"],
        dtype=torch.bfloat16,
        checkpointing=case["checkpointing"],
        num_hidden_layers=case.get("layers", 2),
        lora_dropout=0.1,
        quantise=bnb_experts() if experts else FORMS[case["form"]],
        **sizes,
    )


def train(model: torch.nn.Module) -> list[torch.Tensor]:
    """Losses, gradients and weights of some steps with accumulation and AdamW."""
    seen: list[torch.Tensor] = []
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    torch.manual_seed(3)
    for step in range(STEPS):
        for part in range(ACCUMULATE):
            loss = model(**random_batch(length=20, seed=step * ACCUMULATE + part)).loss
            (loss / ACCUMULATE).backward()
            seen.append(loss.detach().clone())
        seen += [p.grad.clone() for p in trained.values() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(p.detach().clone() for p in trained.values()), torch.get_rng_state()]


def _packed_reloads(step: CompiledStep, packed: dict[str, int]) -> bool:
    """Whether each load of a frozen weight moves the bytes of one of its packed parts, or a range of them."""
    names = {b.vertex: b.name for b in step.captured.bindings if b.source is InputSource.FROZEN}
    vertices = {v.id: v for v in step.plan.vertices}
    for vertex in step.plan.vertices:
        source = vertex
        while swaps_in(source) or swaps_out(source):
            source = vertices[source.inputs[0][0]]
        loads_weight = swaps_in(vertex) and source.id in names
        if loads_weight and vertex.begin + sum(vertex.sizes) > packed[names[source.id]]:
            return False
    return True


def least(model: torch.nn.Module) -> int:
    try:
        train(prepare(model, DiscoConfig(memory_budget="1KiB", plan_cache=None)))
    except BudgetTooSmall as error:
        return error.needed
    raise AssertionError("a step in 1 KiB")


def outcome(case: dict[str, Any]) -> dict[str, Any]:
    # Made anew each time, because not every library's weights can be copied: the seed makes them equal.
    eager = model_of(case)
    packed = {name: tensor.nbytes for name, tensor in frozen_parts(eager).items()}
    expected = train(eager)
    smallest, everything = least(model_of(case)), 1 << 28
    result: dict[str, Any] = {"budgets": {}, "parts": sorted(packed), "packed": sum(packed.values())}
    for name, budget in {"all": everything, "least": smallest, "half": 0}.items():
        budget = budget or (smallest + result["budgets"]["all"]["peak"]) // 2
        model = prepare(model_of(case), DiscoConfig(memory_budget=budget, plan_cache=None))
        got, figures, step = train(model), stats(model), current_step(model)
        assert step is not None
        verify(step.graph, step.plan)
        result["budgets"][name] = {
            "bytes": budget,
            "equal": len(got) == len(expected) and all(map(torch.equal, got, expected)),
            "planned": figures["steps_compiled"],
            "eager": figures["steps_eager"],
            "allocations": figures["engine"]["c10_allocations"],
            "reloaded": figures["reload_bytes"],
            "peak": figures["peak_bytes"],
            "packed_reloads": _packed_reloads(step, packed),
        }
    return result


def main() -> None:
    for case in json.loads(sys.argv[1]):
        try:
            result = outcome(case)
        except Exception:
            result = {"error": traceback.format_exc()}
        print(json.dumps(case | result), flush=True)


if __name__ == "__main__":
    Session.engine = {"dispatch": "random"}
    main()
