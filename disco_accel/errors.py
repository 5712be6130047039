"""The error tree: the message about a user's mistake names the key or tensor, the given value, and one that works."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType


class DiscoError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(DiscoError):
    """A key of a YAML file, an environment variable or an argument is wrong."""


class GraphFileError(ConfigError):
    """A TaskGraph or MemGraph file breaks the schema; the message names the vertex and the key."""


class CaptureError(DiscoError):
    """The step cannot be captured; the message names the op or module and the way out."""


class SelfCheckFailed(CaptureError):
    """Planned steps on the device have other results than plain PyTorch, so nothing is planned for it.

    ``report``: the file to attach to a bug report, if one could be written.
    """

    def __init__(self, message: str, report: Path | None = None) -> None:
        super().__init__(message)
        self.report = report


class PlanError(DiscoError):
    """No plan could be made, or a plan is not valid."""


class VerifyError(PlanError):
    """A MemGraph is not a safe plan of its TaskGraph; the message names the vertices."""


class BudgetTooSmall(PlanError, RuntimeError):
    """The step does not fit the device memory.

    A ``RuntimeError`` with the words of PyTorch's allocator, so that scripts that try smaller batches until one fits
    (accelerate's ``find_executable_batch_size``, Trainer's ``auto_find_batch_size``) do so.

    ``needed`` is the smallest arena, in bytes, for which the planner found a plan; ``given``: the one that it got.
    ``parts``: the uses of the bytes that are needed, in words. Of several devices ``devices`` are those that are short,
    by id, if not all are: the others need no more than they have. ``useful_budgets``: larger ones that are worth
    setting, as of ``step/compile/useful_budgets.py``; ``more``: the same as a sentence.
    """

    def __init__(
        self,
        needed: int,
        given: int,
        what: str = "the step",
        parts: str = "",
        devices: tuple[int, ...] = (),
        useful_budgets: Mapping[str, int] = MappingProxyType({}),
        more: str = "",
    ) -> None:
        # Rounded up, so that the short form works too when it is copied into a budget.
        short = f"{-(-needed * 100 // (1 << 20)) / 100:.2f}MiB"
        why = f" It takes {parts}" if parts else ""
        end = f"{'.' if parts else ''} {more}" if more else ""
        super().__init__(
            f"{what} needs at least {needed} bytes ({short}) of device memory, but is given {given} and would run out "
            f"of memory.{why}{end}"
        )
        self.needed = needed
        self.given = given
        self.what = what
        self.parts = parts
        self.devices = devices
        self.useful_budgets = useful_budgets
        self.more = more

    def with_parts(self, parts: str) -> BudgetTooSmall:
        """A new error with other ``parts``, and without a traceback."""
        return BudgetTooSmall(
            self.needed, self.given, self.what, parts, self.devices, dict(self.useful_budgets), self.more
        )


class ExecutionError(DiscoError):
    """A vertex failed while a step ran; values that the step does not change are as before."""


class StatesTorn(ExecutionError):
    """A step ended early when some of its updates of values that live over steps were done and others were not."""


class DeviceLost(ExecutionError):
    """A device has failed in a way that ends all its work in this process; the message names the vertices in flight."""


class StepsDiffer(ExecutionError):
    """A planned step that ``verify_steps`` compared is not the unplanned one; the message says how far apart which
    tensors are."""


class Stalled(ExecutionError):
    """A step stopped making progress; the message lists vertices that wait and their causes."""


class ExtensionError(ExecutionError):
    """The extension cannot be built or loaded; the message names the missing part and the remedy."""


class StoreError(ExecutionError):
    """The tensor store refuses a request; the message names the object and a request that works."""


class StoreFull(StoreError):
    """A tier of the store has no room for an object; the message names sizes and holders."""


class StoreGone(StoreError):
    """The store's process has ended, or has ended this connection. Tensors that it gave stay readable."""
