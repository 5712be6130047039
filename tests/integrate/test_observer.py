"""An observer of all models hears of plans, steps, backwards and fallbacks, in order, until it is taken off."""

from __future__ import annotations

import dataclasses

from disco_accel import prepare, stats
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.run.observer import Fallback, Observer, observe_all
from tests.integrate.twins import SMALL, batch, config, step
from tests.support.models import tiny_lora


class Heard(Observer):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.reasons: list[str] = []

    def on_plan(self, step: CompiledStep) -> None:
        self.events.append("plan")

    def on_plan_hit(self, step: CompiledStep) -> None:
        self.events.append("hit")

    def on_step(self, step: CompiledStep) -> None:
        self.events.append("step")

    def on_backward(self, step: CompiledStep) -> None:
        self.events.append("backward")

    def on_fallback(self, kind: Fallback, reason: str) -> None:
        self.events.append(f"fallback: {kind}")
        self.reasons.append(reason)


def test_an_observer_hears_of_each_step_until_it_is_taken_off() -> None:
    model = prepare(tiny_lora(**SMALL), dataclasses.replace(config(), on_unsupported="eager"))
    heard = Heard()
    stop = observe_all(heard)
    try:
        step(model)
        assert heard.events == ["plan", "step", "backward"]
        step(model, seed=1)
        assert heard.events[3:] == ["hit", "step", "backward"]
        model(**batch(), return_dict=False)
        assert heard.events[6:] == ["fallback: step"] and heard.reasons == stats(model)["fallbacks"]
        assert "return_dict" in heard.reasons[0]
    finally:
        stop()
    step(model)
    assert len(heard.events) == 7


def test_a_forward_without_a_backward_is_told_as_one() -> None:
    model = prepare(tiny_lora(**SMALL), config())
    heard = Heard()
    stop = observe_all(heard)
    try:
        model(**batch())
    finally:
        stop()
    assert heard.events == ["plan", "step"]
