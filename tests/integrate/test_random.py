"""Dropout in planned steps: losses, gradients and the user's generator as eager execution leaves them, bit for bit."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.capture.captured_step import InputSource
from disco_accel.errors import ExecutionError
from disco_accel.execute.executor import EngineOptions, Executor
from disco_accel.graph.taskgraph import OpCall
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.run.session import current_step
from tests.execute.programs import bump_plan
from tests.integrate.generators import assert_same, assert_same_step, gradients, run
from tests.support.models import family_lora, random_batch

Pair = tuple[torch.nn.Module, torch.nn.Module]
pytestmark = pytest.mark.usefixtures("random_order")


def pair(family: str = "llama", recompute: str = "auto", **options: Any) -> Pair:
    """The same model twice, the second one prepared."""
    torch.set_num_threads(1)
    eager = family_lora(family, **{"lora_dropout": 0.1, **options})
    return eager, prepare(copy.deepcopy(eager), DiscoConfig(memory_budget="4MiB", recompute=recompute))


@pytest.fixture(scope="module")
def llama() -> Pair:
    """LoRA and attention dropout under checkpointing, drawn again in its recomputation. The tests that share it bring
    their own generator state."""
    return pair(dropout=0.2, checkpointing=True, recompute="as-written")


@pytest.mark.parametrize("checkpointing", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize(
    ("family", "attention", "options"),
    [("llama", None, {}), ("gpt2", "eager", {"dropout": 0.2}), ("gpt2", "sdpa", {"dropout": 0.2})],
    ids=["lora", "gpt2 eager", "gpt2 sdpa"],
)
def test_steps_in_a_row_draw_as_eager(
    family: str, attention: str | None, options: dict[str, float], checkpointing: bool
) -> None:
    eager, planned = pair(family, attention=attention, checkpointing=checkpointing, **options)
    torch.manual_seed(5)
    torch.randn(3)
    for seed in range(3):
        assert_same_step(eager, planned, random_batch(seed=seed))
    assert stats(planned)["steps_compiled"] == 3
    assert current_step(planned).draws


def test_accumulated_micro_batches_draw_as_eager(llama: Pair) -> None:
    def accumulate(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad(set_to_none=True)
        for seed in range(3):
            (model(**random_batch(seed=seed)).loss / 3).backward()
        return {**gradients(model), "generator": torch.get_rng_state()}

    assert_same(accumulate(llama[1]), accumulate(llama[0]))


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0,), (1,), ()], ids=str)
def test_two_forwards_then_backwards_in_any_order(llama: Pair, order: tuple[int, ...]) -> None:
    """A step that is run again for its backward repeats its own draws; numbers the user draws meanwhile stay drawn."""

    def both(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        torch.manual_seed(2)
        model.zero_grad(set_to_none=True)
        losses = [model(**random_batch(seed=seed)).loss for seed in range(2)]
        drawn = [torch.rand(3)]
        for index in order:
            losses[index].backward()
            drawn.append(torch.randn(1))
        values = {f"loss {i}": loss.detach() for i, loss in enumerate(losses)}
        return {**values, **gradients(model), "drawn": torch.cat(drawn), "generator": torch.get_rng_state()}

    got, expected = both(llama[1]), both(llama[0])
    if order:
        assert_same(got, expected)
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_evaluation_between_steps_draws_nothing(llama: Pair) -> None:
    eager, planned = llama
    torch.manual_seed(3)
    for model in llama:
        model.eval()
    before = torch.get_rng_state()
    with torch.no_grad():
        assert torch.equal(planned(**random_batch()).loss, eager(**random_batch()).loss)
    assert torch.equal(torch.get_rng_state(), before)
    for model in llama:
        model.train()
    assert_same_step(eager, planned, random_batch(seed=4))


def test_logits_are_those_of_the_step_and_cost_no_draw(llama: Pair) -> None:
    eager, planned = llama
    torch.manual_seed(4)
    expected = eager(**random_batch()).logits
    torch.manual_seed(4)
    output = planned(**random_batch())
    before = torch.get_rng_state()
    assert torch.equal(output.logits, expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_failed_step_has_drawn_nothing(llama: Pair) -> None:
    eager, planned = llama
    torch.manual_seed(6)
    before = torch.get_rng_state()
    bad = random_batch()
    bad["labels"][0, 5] = 1 << 20
    with pytest.raises(ExecutionError, match="nll_loss"):
        planned(**bad)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same_step(eager, planned, random_batch(seed=1))


def test_another_probability_is_another_plan() -> None:
    eager, planned = pair()
    torch.manual_seed(7)
    assert_same_step(eager, planned, random_batch())
    for model in (eager, planned):
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.5
    assert_same_step(eager, planned, random_batch())
    assert stats(planned)["plans"] == 2


def test_recomputation_draws_anew_where_the_user_asks_for_it() -> None:
    """preserve_rng_state=False: eager's backward draws too, from where the user's generator is by then."""
    eager, planned = pair(checkpointing=True, checkpoint_options={"preserve_rng_state": False})

    def step(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        torch.manual_seed(8)
        model.zero_grad(set_to_none=True)
        loss = model(**random_batch()).loss
        torch.rand(5)
        after_forward = torch.get_rng_state()
        loss.backward()
        assert not torch.equal(torch.get_rng_state(), after_forward)
        return {"loss": loss.detach(), **gradients(model), "generator": torch.get_rng_state()}

    for _ in range(2):
        assert_same(step(planned), step(eager))


def step_with(
    compiled: CompiledStep, planned: torch.nn.Module, options: EngineOptions, **changes: Any
) -> dict[str, torch.Tensor]:
    """One step of the compiled plan, changed by ``changes`` (``plan``, ``ops``), on an executor of its own."""
    plan, ops = changes.get("plan", compiled.plan), changes.get("ops", compiled.graph.ops)
    batch, named = random_batch(), dict(planned.named_parameters())
    given = {b.vertex: (batch if b.source == "batch" else named)[b.name].detach() for b in compiled.externals}
    torch.manual_seed(9)
    with Executor(plan, ops, compiled.records, clean=compiled.clean, options=options) as executor:
        executor.begin(given)
        executor.wait_out()
        executor.deliver({b.vertex: torch.ones(()) for b in compiled.vertices_of(InputSource.TANGENT)})
        executor.wait_end()
        loss = compiled.captured.outputs[0]
        found = {"loss": executor.value(loss.ref, loss.spec).clone()}
        for gradient in compiled.captured.gradients:
            found[gradient.name] = executor.value(gradient.ref, gradient.spec).clone()
    return found | {"generator": torch.get_rng_state()}


def expected_and_compiled(llama: Pair) -> tuple[dict[str, torch.Tensor], CompiledStep]:
    torch.manual_seed(9)
    expected = run(llama[0], random_batch())
    torch.manual_seed(9)
    assert_same(run(llama[1], random_batch()), expected)
    return expected, current_step(llama[1])


SCHEDULES = [
    *(EngineOptions(dispatch=mode, compute_threads=1) for mode in ("priority", "fixed", "synchronous")),
    *(EngineOptions(dispatch="random", seed=seed, compute_threads=1) for seed in range(4)),
    *(EngineOptions(dispatch="random", seed=seed, compute_threads=1, compute_streams=2) for seed in range(4)),
]


def test_no_schedule_changes_what_is_drawn(llama: Pair) -> None:
    """Also with two kernels at a time, and where no reuse of memory orders them."""
    expected, compiled = expected_and_compiled(llama)
    for plan in (compiled.plan, bump_plan(compiled.graph)):
        for options in SCHEDULES:
            assert_same(step_with(compiled, llama[1], options, plan=plan), expected)


def differs(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(got[name], value) for name, value in expected.items())


def live_chain(compiled: CompiledStep) -> list[int]:
    return [v for v, call in compiled.graph.ops.items() if call.rng is not None and not call.rng.replay]


def test_a_missing_edge_of_the_chain_is_noticed(llama: Pair) -> None:
    """The three projections of one layer draw side by side: without an edge some schedule draws in another order."""
    expected, compiled = expected_and_compiled(llama)
    chain = live_chain(compiled)
    roomy = bump_plan(compiled.graph)
    cut = next(e for e in itertools.pairwise(chain) if e in roomy.data_edges)
    plan = replace(roomy, data_edges=tuple(e for e in roomy.data_edges if e != cut))
    seeds = (EngineOptions(dispatch="random", seed=seed, compute_threads=1) for seed in range(30))
    assert any(differs(step_with(compiled, llama[1], options, plan=plan), expected) for options in seeds)


def change(ops: dict[int, OpCall], rule: Callable[[OpCall], OpCall]) -> dict[int, OpCall]:
    return {v: rule(call) if call.rng is not None else call for v, call in ops.items()}


def test_swapped_slots_and_live_recomputation_are_noticed(llama: Pair) -> None:
    expected, compiled = expected_and_compiled(llama)
    options = EngineOptions(compute_threads=1)
    ops = dict(compiled.graph.ops)
    assert not differs(step_with(compiled, llama[1], options, ops=ops), expected)

    def swapped(call: OpCall) -> OpCall:
        assert call.rng is not None
        slot = {0: 1, 1: 0}.get(call.rng.slot, call.rng.slot) if call.rng.replay else call.rng.slot
        return replace(call, rng=replace(call.rng, slot=slot))

    got = step_with(compiled, llama[1], options, ops=change(ops, swapped))
    assert differs(got, expected) and torch.equal(got["generator"], expected["generator"])

    def redrawn(call: OpCall) -> OpCall:
        assert call.rng is not None
        return replace(call, rng=replace(call.rng, replay=False))

    got = step_with(compiled, llama[1], options, ops=change(ops, redrawn))
    assert not torch.equal(got["generator"], expected["generator"])
