"""The inputs of a step, kept so that it can run again: the random generator, and the tensors as they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from disco_accel.native.backend import backend_of
from disco_accel.native.host_memory import WatchedTensors
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.state.plain_tensors import follows_autograd

_FROZEN = "a frozen weight"


def generator_state(step: CompiledStep) -> torch.Tensor | None:
    """Where the generator that ``step`` draws from is now; None for a step that draws nothing."""
    if not step.draws:
        return None
    return backend_of(torch.device(step.engine.device)).rng_state()


def _set_generator(step: CompiledStep, state: torch.Tensor | None) -> None:
    """``state``: of ``generator_state``."""
    if state is not None:
        backend_of(torch.device(step.engine.device)).set_rng_state(state)


@contextmanager
def generator_from(step: CompiledStep, state: torch.Tensor | None) -> Iterator[None]:
    """Draw again from ``state`` on; afterwards the generator is where it was."""
    live = generator_state(step)
    _set_generator(step, state)
    try:
        yield
    finally:
        _set_generator(step, live)


@contextmanager
def kept_on_failure(step: CompiledStep) -> Iterator[None]:
    """After an error inside, the user's generator is where it was."""
    before = generator_state(step)
    try:
        yield
    except BaseException:
        _set_generator(step, before)
        raise


class _NormSnapshot:
    """Tensors of any device as they were when this was made, by a norm of each. Making it waits for nothing."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._norms = self._compute_norms()

    def _compute_norms(self) -> torch.Tensor:
        with torch.no_grad():
            norms = torch._foreach_norm(self._tensors, 2, dtype=torch.float32)
            # As words: a NaN is equal to itself.
            return torch.stack(norms).view(torch.int32)

    def changed(self) -> bool:
        return not torch.equal(self._compute_norms(), self._norms)


def versions_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Name → version, as autograd counts them; tensors made in inference mode have none."""
    with torch._C.DisableTorchFunctionSubclass():
        return {name: tensor._version if follows_autograd(tensor) else 0 for name, tensor in tensors.items()}


class InputSnapshot:
    """The tensors that a step was given, and the frozen weights, as they are when this is made.

    ``trainable``: the model's own parameters by name. ``batch``: those of the step, by name. Versions are autograd's:
    exact, and as cheap as an integer. They miss writes through ``.data``, which is how DeepSpeed's optimizers and
    averages of weights write; those are looked for by content.
    """

    def __init__(
        self, trainable: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor], frozen: WatchedTensors
    ) -> None:
        self._trainable = dict(trainable)
        self._tensors = {**batch, **trainable}
        self._versions = versions_of(self._tensors)
        # Replaced, not changed, when the weights are looked at again: what this forward saw stays here.
        self._frozen = frozen
        with torch._C.DisableTorchFunctionSubclass():
            weights = [t for t in trainable.values() if t.numel()]
            host = all(t.is_cpu for t in weights)
            self._content = (WatchedTensors(weights) if host else _NormSnapshot(weights)) if weights else None

    def changed(self, *, content: bool) -> str | None:
        """Names the first change since; ``content``: look for writes that versions miss as well."""
        return self.begin_check(content=content) or self.finish_check()

    def weights_changed(self) -> bool:
        """Whether a trainable parameter was changed since."""
        if any(version != self._versions[name] for name, version in versions_of(self._trainable).items()):
            return True
        return self._content is not None and self._content.changed()

    def begin_check(self, *, content: bool) -> str | None:
        """As ``changed``, but for frozen weights that must be read to know: that goes on until ``finish_check``."""
        for name, version in versions_of(self._tensors).items():
            if version != self._versions[name]:
                return name
        if content and self._content is not None and self._content.changed():
            return "a trainable parameter"
        return _FROZEN if self._frozen.begin_check() else None

    def finish_check(self) -> str | None:
        """The rest of ``begin_check``."""
        return _FROZEN if self._frozen.finish_check() else None
