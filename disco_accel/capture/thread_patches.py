"""Changes that a capture makes outside of itself, each for the capturing thread alone.

Other threads train, evaluate and draw meanwhile, and must notice nothing. A new change goes into this table and into
tests/integrate/test_other_threads.py. ``patched`` also serves the load of a packed checkpoint, outside of any capture:
integrate/hf/safetensors_file.py.

| what | where | other threads |
| --- | --- | --- |
| mask functions of transformers | integrate/hf/tracing.py | get the original: ``patched`` |
| TRL's question for Triton | integrate/hf/tracing.py | get the original: ``patched`` |
| checkpoint function of modules | integrate/hf/tracing.py | get the original: ``patched`` |
| torch's checkpoint function | capture/checkpointing.py | get the original: ``patched`` |
| ``torch.manual_seed`` and its kin | capture/rng.py | get the original: ``patched``; the generator is never set |
| ``Tensor.tolist``, ``Tensor.numpy``, ``Tensor.__deepcopy__`` | capture/constants.py | get the original: ``patched`` |
| global module hooks | capture/trace_log.py | do nothing for modules of other models |
| twins in the place of parameters and buffers | capture/step.py | read the tensors themselves: thread_tables.py |
| attributes of modules that the forward sets | the model | its modules wait: waiting_modules.py, capture_lock.py |
| ``FakeTensor.data`` | capture/constants.py | is assigned as ever |
| methods of tensors, for quantisation libraries | capture/fake_kernels.py | get the original: ``patched`` |
| objects beside quantised weights | capture/parts.py | its modules wait: waiting_modules.py, capture_lock.py |
| fake kernel of ``_grouped_mm`` | capture/fake_kernels.py | fall through to torch's own rule |
| cuDNN's attention switched off | capture/attention.py | ``patched``; off for all, during each call of the capture's |
| rows of attention's masks | capture/attention.py | get the original: ``patched`` |
| messages of torch's fake tensors | capture/fake_kernels.py | are logged: a filter that asks for the thread |
| torch.fx's note that it traces | capture/op_recorder.py | compiled functions that they call run uncompiled |
| grad mode, autocast, dispatch modes, autograd's threads | capture/step.py | thread-local in PyTorch |
| draws of random ops that are measured | measure/record.py | the generator is put back after each such op |
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(
    owner: Any,
    name: str,
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
    elsewhere: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """``owner.name`` replaced by ``make(original)`` for this thread; ``elsewhere`` is told of another one's calls.

    A replacement that somebody else has made meanwhile stays; if they put ours back later, it only passes calls on.
    """
    original = getattr(owner, name)
    ours, thread = make(original), threading.get_ident()
    active = True

    def chosen(*args: Any, **kwargs: Any) -> Any:
        if active and threading.get_ident() == thread:
            return ours(*args, **kwargs)
        elsewhere()
        return original(*args, **kwargs)

    chosen = functools.update_wrapper(chosen, original) if hasattr(original, "__name__") else chosen
    own = name in vars(owner)
    setattr(owner, name, chosen)
    try:
        yield
    finally:
        active = False
        if vars(owner).get(name) is chosen:
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
