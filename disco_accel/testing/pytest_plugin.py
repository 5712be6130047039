"""A pytest plugin that routes the models of somebody else's test-suite through plans, to judge us by their tests.

``pytest -p disco_accel.testing.pytest_plugin --disco=models --disco-config=disco.yaml --disco-report=report.json``

``--disco=launch`` works as a launcher: models with an adapter over frozen weights are prepared on their way through
``Accelerator.prepare`` and Trainer. ``--disco=models`` prepares any model that is called with gradients and has a
trainable parameter, also one that has no frozen ones. ``--disco=callback`` counts for tests that ask for plans
themselves. ``--disco=off`` only writes the report.
"""

from __future__ import annotations

import functools
import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from disco_accel.config import settings as configuration
from disco_accel.config.settings import DiscoConfig
from disco_accel.errors import ConfigError
from disco_accel.integrate.launch import import_hook
from disco_accel.integrate.prepare import prepare
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.run.observer import Fallback, Observer, observe_all
from disco_accel.step.run.session import find_state


@dataclass
class _Ran:
    """What one test came to. ``forwards`` and ``backwards`` ran from plans; ``fallbacks``: why others did not."""

    outcome: str = "passed"
    forwards: int = 0
    backwards: int = 0
    eager: int = 0
    fallbacks: list[str] = field(default_factory=list)


class Judge(Observer):
    """Counts, for each test, steps from a plan and steps in eager mode, and writes them as JSON."""

    def __init__(self, report: Path | None) -> None:
        self._report = report
        self._tests: dict[str, _Ran] = {}
        self._running = _Ran()

    def on_step(self, step: CompiledStep) -> None:
        """A planned forward of the test that runs."""
        self._running.forwards += 1

    def on_backward(self, step: CompiledStep) -> None:
        """A planned backward of the test that runs."""
        self._running.backwards += 1

    def on_fallback(self, kind: Fallback, reason: str) -> None:
        """A training step of the test that runs, in eager mode."""
        if kind is Fallback.STEP:
            self._running.eager += 1
            self._running.fallbacks.append(reason)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Start counting anew."""
        self._running = self._tests[item.nodeid] = _Ran()
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The worst of setup, call and teardown is the test's outcome."""
        if report.outcome != "passed":
            self._tests.setdefault(report.nodeid, _Ran()).outcome = report.outcome

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One line with the counts, and the reasons of fallbacks with how often each was seen."""
        tests = self._tests.values()
        terminalreporter.write_line(
            f"disco: {sum(t.backwards > 0 for t in tests)} tests trained through a plan, "
            f"{sum(t.forwards > 0 for t in tests)} ran a forward of one; {sum(t.forwards for t in tests)} planned "
            f"forwards, {sum(t.backwards for t in tests)} backwards, {sum(t.eager for t in tests)} forwards eager"
        )
        for reason, times in Counter(r for t in tests for r in t.fallbacks).most_common():
            terminalreporter.write_line(f"disco: {times} x eager: {reason}")

    def pytest_sessionfinish(self) -> None:
        """Write the report."""
        if self._report is not None:
            content = {name: asdict(ran) for name, ran in self._tests.items()}
            self._report.write_text(json.dumps(content, indent=1), encoding="utf-8")


def _route(config: DiscoConfig) -> None:
    """Prepare each model from now on when it is first called with gradients from outside of any other module."""
    call, inside = torch.nn.Module.__call__, threading.local()

    @functools.wraps(call)
    def routed(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if getattr(inside, "a_call", False) or not torch.is_grad_enabled():
            return call(module, *args, **kwargs)
        inside.a_call = True
        try:
            wrapper = isinstance(getattr(module, "module", None), torch.nn.Module)
            if not wrapper and find_state(module) is None and any(p.requires_grad for p in module.parameters()):
                prepare(module, config)
            return call(module, *args, **kwargs)
        finally:
            inside.a_call = False

    torch.nn.Module.__call__ = routed  # type: ignore[method-assign]


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--disco``, ``--disco-config`` and ``--disco-report``."""
    group = parser.getgroup("disco_accel")
    group.addoption(
        "--disco", choices=("off", "launch", "models", "callback"), default="off", help="what runs from plans"
    )
    group.addoption("--disco-config", metavar="FILE", help="YAML with a disco_config section")
    group.addoption("--disco-report", metavar="FILE", type=Path, help="JSON: what each test ran")


def pytest_configure(config: pytest.Config) -> None:
    """Install the route before any test module is imported."""
    mode, file = config.getoption("--disco"), config.getoption("--disco-config")
    judge = Judge(config.getoption("--disco-report"))
    config.pluginmanager.register(judge, "disco-judge")
    if mode == "off":
        return
    if file is None:
        raise pytest.UsageError(f"--disco={mode} needs --disco-config")
    observe_all(judge)
    if mode == "callback":
        return
    try:
        if mode == "launch":
            configuration.set_launch_config_file(file)
            configuration.launch_config()
            import_hook.activate()
        else:
            _route(DiscoConfig.from_yaml(file))
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from error
