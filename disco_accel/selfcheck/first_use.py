"""The two doors of the self-check: the first use of a device, and a command; and their messages."""

from __future__ import annotations

import logging
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from disco_accel.config.settings import DiscoConfig
from disco_accel.errors import DiscoError, SelfCheckFailed
from disco_accel.native.backend import first_accelerator, run_device
from disco_accel.selfcheck import self_check
from disco_accel.selfcheck.outcome import (
    Outcome,
    forget,
    identity_of,
    kept_outcome,
    key_of,
    records,
    store,
    write_report,
)
from disco_accel.selfcheck.subject import Subject, make_subject

logger = logging.getLogger("disco_accel")

Tracing = Callable[[], AbstractContextManager[Any]]

_lock = threading.Lock()
Rates = Mapping[str, float]
"""Of a link, bytes/s: ``h2d``, ``d2h``, and ``both`` for each way while both run."""

_answers: dict[torch.device, SelfCheckFailed | Rates] = {}
"""Devices that this process has an answer for. An index means the same device throughout a process."""


def require_passed(
    device: torch.device,
    folder: str | None,
    *,
    tracing: Tracing = nullcontext,
    link_bytes: int = self_check.LINK_BYTES,
    make: Callable[[torch.device], Subject] | None = None,
) -> Rates:
    """The rates of the link to ``device``, from its check: the one before, in this process or by a file below
    ``folder``, or else one now. None of them where the file has none.

    ``tracing`` is entered around a capture. ``link_bytes``: of the device memory that measuring the link may take.

    Raises:
        SelfCheckFailed: now or before in this process.
        ExtensionError, and shortages of memory: as a step that is prepared does; the next call tries again.
    """
    with _lock:
        if device not in _answers:
            _answers[device] = _answer(device, folder, make or partial(make_subject, tracing=tracing), link_bytes)
        answer = _answers[device]
    if isinstance(answer, SelfCheckFailed):
        raise SelfCheckFailed(str(answer), answer.report)
    return answer


def _answer(
    device: torch.device, folder: str | None, make: Callable[[torch.device], Subject], link_bytes: int
) -> SelfCheckFailed | Rates:
    kept = None if folder is None else kept_outcome(folder, key_of(identity_of(device)))
    if kept is not None:
        return _rates(kept.get("figures"))
    outcome = self_check.check(device, make, link_bytes)
    error = conclude(outcome, folder)
    if error is not None:
        return error
    logger.info("%s", passed_line(outcome, folder))
    return _rates(outcome.figures)


def _rates(figures: Any) -> Rates:
    rates = figures.get("link") if isinstance(figures, dict) else None
    found = rates.items() if isinstance(rates, dict) else ()
    return {name: float(rate) for name, rate in found if isinstance(rate, float | int) and rate > 0}


def conclude(outcome: Outcome, folder: str | None) -> SelfCheckFailed | None:
    """Keep an ``outcome`` that passed below ``folder``; the error of one that failed, its report written."""
    key = key_of(outcome.identity)
    if outcome.passed:
        if folder is not None:
            store(folder, key, outcome)
        return None
    if folder is not None:
        forget(folder, key)
    report = write_report(folder, outcome, {"platform": platform.platform()})
    return SelfCheckFailed(failed_line(outcome, None if report is None else str(report)), report)


def passed_line(outcome: Outcome, folder: str | None) -> str:
    """The result in one line."""
    rates = ", ".join(f"{name} {rate / 1e9:.3g} GB/s" for name, rate in outcome.figures["link"].items())
    lifetime = "not kept, since plan_cache is null" if folder is None else "kept until driver, PyTorch or device change"
    compared = "bit for bit" if outcome.figures["compared"] == "bits" else outcome.figures["compared"]
    return (
        f"self-check of {outcome.identity['device']} passed in {outcome.seconds:.1f} s: planned steps are plain "
        f"PyTorch's {compared}; link: {rates}; {lifetime}"
    )


def failed_line(outcome: Outcome, report: str | None) -> str:
    """The differences and the way out, in one line."""
    others = len(outcome.differences) - 1
    more = f", and {others} more difference{'s' if others > 1 else ''}" if others else ""
    first = str(outcome.differences[0]).splitlines()[0]
    attach = f"attach {report} to a bug report" if report else "report it as a bug"
    return (
        f"self-check: planned steps on {outcome.identity['device']} may be wrong: {first}{more}; {attach}. "
        "disco-accel doctor --selftest checks again, after another driver or PyTorch, say; on_unsupported: eager "
        "trains without plans until then; self_check: off uses the device as it is"
    )


def kept_answers(devices: Sequence[torch.device] | None = None) -> list[dict[str, Any]]:
    """For ``disco-accel doctor``, of each of ``devices`` (None: all GPUs) the last check of that very device that has
    passed; empty where none is kept. ``when`` in seconds since 1970, its ``seconds`` and ``figures``, and ``changed``:
    the facts that it no longer holds for, none where it still holds."""
    if devices is None:
        first = first_accelerator(0)
        count = 0 if first is None else first.count()
        devices = [] if first is None else [torch.device(first.device.type, index) for index in range(count)]
    folder = DiscoConfig.from_env(DiscoConfig()).plan_cache
    kept = [] if folder is None else sorted(records(folder), key=lambda record: record[0], reverse=True)
    answers = []
    for device in devices:
        identity = identity_of(device)
        answer: dict[str, Any] = {}
        mine = [record for record in kept if _same_device(record[1].get("identity"), identity)]
        for when, outcome in mine:
            changed = [name for name in identity if outcome["identity"].get(name) != identity[name]]
            told = {name: outcome.get(name) for name in ("seconds", "figures")}
            # One that holds goes before newer ones that do not.
            if "when" not in answer or not changed:
                answer |= {"when": when, **told, "changed": changed}
        answers.append(answer)
    return answers


def _same_device(recorded: Any, identity: Mapping[str, str]) -> bool:
    return isinstance(recorded, dict) and all(recorded.get(n) == identity.get(n) for n in ("device", "uuid"))


def selftest(device: str) -> dict[str, Any]:
    """``disco-accel doctor --selftest``: the outcome for ``device`` (auto, cpu, cuda) as JSON, with ``problem``, a line
    for its user or "".

    The answer replaces the one that is kept beside the plans. Raises ConfigError for a device that is not there.
    """
    config = DiscoConfig.from_env(DiscoConfig(device=device))
    where = run_device(config.resolve().device)
    try:
        outcome = self_check.check(where)
    except DiscoError as error:
        return {"passed": False, "problem": f"self-check: cannot run: {error}"}
    failed = conclude(outcome, config.plan_cache)
    return {**outcome.as_dict(), "problem": "" if failed is None else str(failed)}
