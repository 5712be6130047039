"""Facts that tracing alone cannot see: which phase and layer, and which module, each traced op belongs to.

A ``TraceLog`` is active while a step is traced. Every op of the trace gets a ``NodeInfo`` on its node, from
``op_recorder.py``. Phases and layers belong to segments under activation checkpointing: ``checkpointing.py`` sets them.
"""

from __future__ import annotations

import linecache
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._C._autograd import _get_sequence_nr
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from disco_accel.capture.waiting_modules import wait_for_capture
from disco_accel.errors import CaptureError

FORWARD, RECOMPUTE, BACKWARD = "forward", "recompute", "backward"
_INFO_KEY = "disco_accel"
_PACKAGE = str(Path(__file__).parent.parent)
_TORCH = str(Path(torch.__file__).parent)
# transformers' own checks, which say nothing of the model that makes them.
_HELPERS = ("import_utils.py", "generic.py")
# Autograd rounds these gradients otherwise for a tensor without values than for one with.
_OTHER_FORMULA = frozenset(("ProdBackward0", "ProdBackward1", "CumprodBackward0"))


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """``phase`` is "" outside checkpointed segments; ``layer`` counts those segments in forward order.

    ``in_backward``: issued while autograd ran a backward.
    """

    phase: str = ""
    layer: int = -1
    module: str = ""
    in_backward: bool = False


@dataclass
class TraceLog:
    """State of one trace, which makes ``graph``. ``output_grads`` keeps the gradient of each checkpointed segment's
    outputs, by layer.

    ``redrawn``: segments whose recomputation draws new random numbers (``preserve_rng_state=False``). ``nested``:
    segments inside other segments. ``unmarked``: modules, by identity, whose forward ran under a checkpoint function
    that did not call torch's. ``reentrant_leaves``: storages trained in segments with ``use_reentrant=True``.
    """

    module_names: Mapping[int, str]
    modules: list[str] = field(default_factory=list)
    phase: str = ""
    layer: int = -1
    layers: int = 0
    output_grads: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    layer_modules: dict[int, str] = field(default_factory=dict)
    redrawn: set[int] = field(default_factory=set)
    nested: set[int] = field(default_factory=set)
    unmarked: set[int] = field(default_factory=set)
    reentrant_leaves: set[int] = field(default_factory=set)
    graph: fx.Graph = field(default_factory=fx.Graph)
    checks: list[Callable[[TraceLog], None]] = field(default_factory=list)
    """Called with the log when the trace is complete."""
    by_sequence: dict[int, str] = field(default_factory=dict)
    formulas: dict[str, str] = field(default_factory=dict)
    """Autograd nodes of ``_OTHER_FORMULA`` that ran, with the module of each."""
    around: Any = field(default_factory=torch._C._current_autograd_node)
    """The node whose backward a trace was started from, which is none of its own."""

    @property
    def module(self) -> str:
        """Dotted path of the module that is running."""
        return self.modules[-1] if self.modules else ""

    def info(self) -> NodeInfo:
        """The note for the node of an op that runs now."""
        return NodeInfo(self.phase, self.layer, self._issuer(), self.in_backward)

    @property
    def in_backward(self) -> bool:
        """Whether autograd runs a backward of the trace."""
        return self._node() is not None

    def _node(self) -> Any:
        node = torch._C._current_autograd_node()
        return None if node is self.around else node

    def _issuer(self) -> str:
        node = self._node()
        if node is None:
            # Autograd numbers its nodes in the order they are made, and makes an op's node just before the op runs.
            self.by_sequence.setdefault(_get_sequence_nr() - 1, self.module)
            return self.module
        issuer = self.module or self.by_sequence.get(node._sequence_nr()) or self.layer_modules.get(self.layer, "")
        if node.name() in _OTHER_FORMULA:
            self.formulas.setdefault(node.name(), issuer)
        return issuer


_active = threading.local()


def active_log() -> TraceLog | None:
    """The log of the trace that this thread runs, if any."""
    log: TraceLog | None = getattr(_active, "log", None)
    return log


def note(node: fx.Node, info: NodeInfo) -> None:
    """Note ``info`` on ``node`` of a trace."""
    node.meta[_INFO_KEY] = info


def node_info(node: fx.Node) -> NodeInfo:
    """The note on ``node``."""
    info: NodeInfo = node.meta.get(_INFO_KEY, NodeInfo())
    return info


def arguments_of(node: fx.Node, target: torch._ops.OpOverload) -> dict[str, Any]:
    """Argument name → value as traced, in schema order of ``target``, defaults filled in."""
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in target._schema.arguments}


@contextmanager
def logging_trace(model: torch.nn.Module) -> Iterator[TraceLog]:
    """The log of a trace that this thread makes inside; it knows which module of ``model`` runs."""
    log = TraceLog({id(module): name for name, module in model.named_modules()})
    with ExitStack() as stack:
        for handle in (
            register_module_forward_pre_hook(wait_for_capture),
            register_module_forward_pre_hook(_enter_module),
            register_module_forward_hook(_leave_module),
        ):
            stack.callback(handle.remove)
        _active.log = log
        stack.callback(setattr, _active, "log", None)
        yield log
        for check in log.checks:
            check(log)


def _enter_module(module: torch.nn.Module, _args: Any) -> None:
    log = active_log()
    if log is not None:
        if id(module) in log.unmarked and log.in_backward and log.phase != RECOMPUTE:
            raise CaptureError(unmarked(log.module_names.get(id(module), "")))
        log.modules.append(log.module_names.get(id(module), log.module))


def code_line(error: BaseException) -> str:
    """``" (modeling_x.py:210, `if n != m:`)"``, the innermost line outside torch and this package; '' without one."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        if file.startswith((_PACKAGE, _TORCH, "<")) or Path(file).name in _HELPERS:
            continue
        return f" ({Path(file).name}:{line}, `{linecache.getline(file, line).strip()}`)"
    return ""


def unmarked(module: str) -> str:
    """The message about a module under a checkpointing that is not torch's."""
    return (
        f"the checkpoint function of {module or 'the model'} does not call torch.utils.checkpoint.checkpoint: what "
        "it recomputes cannot be captured; use torch's, as model.gradient_checkpointing_enable() does"
    )


def _leave_module(_module: torch.nn.Module, _args: Any, _output: Any) -> None:
    # Not called when the module raised: the stack then still names it, which is what the error needs.
    log = active_log()
    if log is not None and log.modules:
        log.modules.pop()
