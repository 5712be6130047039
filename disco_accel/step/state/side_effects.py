"""Side effects of a forward that is captured: they would happen once, at the capture, and not at each step.

Around a trace the model's Python state and the generators of Python's and numpy's random numbers are compared. Random
numbers and recorded tensors cannot be part of a plan. Another change, such as a flag that the first forward sets, holds
for this step, whose plan is then used once; where the next capture changes the same again, it is no plan's either.
"""

from __future__ import annotations

import logging
import random
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from disco_accel.errors import CaptureError
from disco_accel.native.change_watch import ABSENT, ANYTHING, ExecutedCode, Kind, executed_code
from disco_accel.step.state.containers import TABLES, Change, Container, entry_name
from disco_accel.step.state.forward_code import global_names, is_foundation, is_library, is_pure
from disco_accel.step.state.step_key import model_state

logger = logging.getLogger("disco_accel")

_RANDOM_NAMES = frozenset(
    [
        *("random", "randint", "randrange", "uniform", "choice", "choices", "sample", "shuffle", "gauss"),
        *("normalvariate", "getrandbits", "rand", "randn", "normal", "integers", "standard_normal"),
        *("permutation", "binomial", "beta", "exponential", "triangular"),
    ]
)
MAX_NEW_STATES = 8
"""Plans in a row that were each for a state of the model never met before. One takes seconds to minutes to make, so
more would look like a hang; a schedule that sets an attribute anew every few steps has fewer."""

_FRESH = frozenset(("default_rng", "RandomState", "Random", "SystemRandom", "urandom", "token_bytes", "uuid4"))
"""Names of generators and functions whose numbers follow from no state."""
_HEARD = frozenset(("print", "input", "open", "time", "perf_counter", "monotonic", "time_ns", "perf_counter_ns"))
"""Names of acts besides computing: a forward does them when it is captured, of which the user is told."""


class Effects:
    """The side effects of the captures of one model."""

    def __init__(self) -> None:
        self._changes: list[Change] = []
        self._earlier: set[str] = set()
        self._told: set[types.CodeType] = set()
        self._state = -1
        self._new_states = 0

    def admit(self, state: int, difference: str) -> None:
        """A plan is wanted for ``state``, a number of ``ModelState``, and there is none.

        Raises:
            CaptureError: it has been another state, never met before, at each of the last steps; ``difference`` names
                the last change.
        """
        self._new_states = self._new_states + 1 if state != self._state else 0
        self._state = state
        if self._new_states > MAX_NEW_STATES:
            raise CaptureError(
                f"{difference}: another one at each of the last {MAX_NEW_STATES} steps, and each would need a plan of "
                "its own; pass what changes from step to step as an argument of forward, or change a buffer in place"
            )

    def met(self) -> None:
        """There is a plan for the state that the model is in."""
        self._new_states = 0

    @property
    def lasting(self) -> bool:
        """Whether the last capture left a change behind, so that its plan is for this step alone."""
        return bool(self._changes)

    @contextmanager
    def of_capture(self) -> Iterator[None]:
        """Around the capture of one step, which may take several traces. If it fails, the state is as it was."""
        self._earlier = {_label(change) for change in self._changes}
        self._changes = []
        try:
            yield
        except BaseException:
            self._undo()
            raise

    def _undo(self) -> None:
        for container, _ in self._changes:
            _put_back(container)
        self._changes = []

    @contextmanager
    def of_trace(self, model: torch.nn.Module) -> Iterator[None]:
        """Around one trace of ``model``. Of several traces for one step the last one's changes hold.

        Raises:
            CaptureError: the traced code drew random numbers of Python's or numpy's, or keeps tensors, or repeats a
                change of the capture before. The state is then as it was.
        """
        self._undo()
        state = model_state(model)
        before = state.snapshot(model)
        generators = _Generators(before.generators)
        finished = False
        executed: ExecutedCode = []
        try:
            with executed_code() as executed:
                yield
            finished = True
        finally:
            # Another thread may have drawn meanwhile, whose numbers are none of ours.
            drawn = generators.restore_if_drawn() if _draws(executed) else ""
            self._changes = [c for change in before.changes() if (c := _without_swaps(change)) is not None]
            if not finished:
                self._undo()
                # A refusal, too, holds as long as nothing changes that the code up to it has read.
                state.ran(model, executed, changed=False)
        try:
            _refuse_random(drawn, executed)
            self._refuse_changes()
        except CaptureError:
            self._undo()
            state.ran(model, executed, changed=False)
            raise
        self._tell(executed)
        state.ran(model, executed, changed=self.lasting)

    def _refuse_changes(self) -> None:
        for container, values in self._changes:
            if any(map(_holds_tensor, values.values())):
                place = _place((container, values))
                raise CaptureError(
                    f"{place}: the forward keeps a tensor there, which a plan would not do at each step; "
                    "remove the hook or code that records it, or return the tensor as a field of the output"
                )
        again = sorted(self._earlier & {_label(change) for change in self._changes})
        if again:
            self._new_states = MAX_NEW_STATES
            raise CaptureError(
                f"{again[0]}: changes each time the forward runs, and a plan would not change it; keep counters and "
                "logs out of the forward, or mark a hook that nothing depends on with disco_accel.pure"
            )

    def _tell(self, executed: ExecutedCode) -> None:
        for code, namespace, _ in executed:
            if is_library(code) or is_pure(code) or code in self._told:
                continue
            heard = sorted(n for n in _HEARD & set(code.co_names) if n not in namespace or not _own(namespace[n]))
            if heard:
                self._told.add(code)
                logger.warning(
                    "%s (%s:%d) calls %s: in a planned step it does so when the step is captured, not each time",
                    code.co_qualname,
                    code.co_filename,
                    code.co_firstlineno,
                    ", ".join(heard),
                )


def _own(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and not is_library(value)


@dataclass
class _Generators:
    """Generators of random numbers outside of PyTorch, and the states that they were in when this was made."""

    own: Sequence[Any]
    states: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.states = [_state_of(g) for g in self._all()]

    def _all(self) -> list[Any]:
        return [random, np.random, *self.own]

    def restore_if_drawn(self) -> str:
        """Whose numbers were drawn, if any were; the states are then as they were."""
        drawn = ""
        for generator, state in zip(self._all(), self.states, strict=True):
            if _differs(_state_of(generator), state):
                drawn = drawn or ("numpy" if "numpy" in f"{type(generator)}{generator}" else "Python")
                _set_state(generator, state)
        return drawn


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if generator is np.random or isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=True)
    return generator.getstate()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif generator is np.random or isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)


def _differs(one: Any, other: Any) -> bool:
    return repr(one) != repr(other) or (isinstance(one, tuple) and _words(one) != _words(other))


def _words(state: tuple[Any, ...]) -> list[Any]:
    return [part.tolist() if isinstance(part, np.ndarray) else part for part in state]


def _draws(executed: ExecutedCode) -> list[types.CodeType]:
    """Code that may draw random numbers without PyTorch, by the names in it."""
    return [code for code, ns, _ in executed if not is_foundation(code, ns) and _RANDOM_NAMES & global_names(code)]


def _refuse_random(drawn: str, executed: ExecutedCode) -> None:
    """Raises CaptureError for numbers that were drawn, and for code that makes generators which start anywhere."""
    fresh = [
        code for code, *_ in executed if not is_library(code) and not is_pure(code) and _FRESH & global_names(code)
    ]
    if not drawn and not fresh:
        return
    candidates = _draws(executed)
    blamed = fresh or [code for code in candidates if not is_library(code)] or candidates
    where = ", ".join(f"{c.co_qualname} ({c.co_filename}:{c.co_firstlineno})" for c in blamed[:3]) or "the forward"
    source = f"draws from {drawn}'s generator" if drawn else "makes a generator of its own"
    raise CaptureError(
        f"random numbers: {where} {source}, and a plan would repeat the numbers of its capture; draw with torch.rand, "
        "or before the forward and pass the numbers as arguments (layerdrop, apply_spec_augment and the like are "
        "settings of the model: switch them off)"
    )


def _place(change: Change) -> str:
    """Names the first entry that differs."""
    container, values = change
    return entry_name(container, next(iter(values)))


def _label(change: Change) -> str:
    """Names a change, with one name for all items that are added to a list."""
    return _place(change) if change[0].kind in (Kind.ATTRIBUTES, Kind.NAMES) else change[0].where


def _without_swaps(change: Change) -> Change | None:
    """The change less a trace's own changes of modules: fake tensors stand for their weights, also in lists of them
    that recurrent layers keep. That is put back here, where the tables of the modules are not put back by the trace."""
    container, values = change
    if container.kind is Kind.DICT and container.where.rpartition(".")[2] in TABLES:
        return None
    if container.kind is not Kind.ATTRIBUTES or not isinstance(container.owner, torch.nn.Module):
        return change
    names = {n for table in TABLES for n in getattr(container.owner, table)}
    if isinstance(container.owner, torch.nn.RNNBase):
        names |= {"_flat_weights", "_flat_weight_refs"}
    values = {k: v for k, v in values.items() if k not in names}
    if not values:
        _put_back(container)
        return None
    return container, values


def _holds_tensor(value: Any, depth: int = 4) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0:
        return False
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple, set)):
        return False
    return any(_holds_tensor(item, depth - 1) for item in value)


def _put_back(container: Container) -> None:
    """Give a container the content of its snapshot again."""
    owner, content = container.owner, container.snapshot
    if container.kind is Kind.LIST:
        owner[:] = content
    elif container.kind is Kind.CELL:
        if content[0] is ABSENT:
            del owner.cell_contents
        else:
            owner.cell_contents = content[0]
    elif container.kind is Kind.EQUAL:
        del_all = owner.clear if hasattr(owner, "clear") else lambda: owner.__delitem__(slice(None))
        del_all()
        (owner.update if isinstance(owner, set) else owner.extend)(content[0])
    else:
        table = owner.__dict__ if container.kind is Kind.ATTRIBUTES else owner
        pairs = dict(zip(content[::2], content[1::2], strict=True))
        if container.kind is not Kind.NAMES:
            for key in [k for k in table if k not in pairs]:
                del table[key]
        dict.update(table, {k: v for k, v in pairs.items() if v is not ANYTHING})
