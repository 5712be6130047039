"""Homes of states, and which device copies are newer than these.

A *state* is a value that lives over steps and changes. Its *home* is a range of host memory of its own. A step leaves
the last version of a state at home, or on the device alone where the next step starts with it: then the home is older
until ``Executor.store_states`` writes it.

Bytes that the user writes to a home between steps:

- of a state that is not resident: the next step reads it;
- of a resident one: no step reads it, and it is overwritten in time, unless ``Executor.restore_states`` follows.

A home stays in use, and its memory alive, when the tensor that it was made of gets other memory (``.data = ``): steps
do not see that. A home whose own storage was resized or freed is an ExecutionError at the next step.

Kernels of a device that lies in host memory change states at their homes, where the user sees it while a step runs.

A step that changes states and ends early, by a failure, by ``abandon`` or by Ctrl-C, leaves *torn* states if a kernel
or an offload that changes one was launched: steps are refused until ``Executor.restore_states``. On CUDA, homes should
be pinned as the bytes of frozen inputs are (``HostMemory.pin``): copies from and to other memory are right too, but the
engine launches nothing else until they have ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch

from disco_accel.errors import ExecutionError, StatesTorn
from disco_accel.execute.planned_states import PlannedStates
from disco_accel.execute.vertex_names import Describer
from disco_accel.graph.taskgraph import TensorSpec, Vertex
from disco_accel.graph.values import changes_over_steps

_NAMED = 4
"""States that a message names."""

_HOLDERS: weakref.WeakValueDictionary[int, StateHomes] = weakref.WeakValueDictionary()
"""Address of an arena's memory → whose states lie there and are newer than their homes."""


def homes_of(
    vertices: Iterable[Vertex], given: Mapping[int, torch.Tensor], describer: Describer
) -> dict[int, torch.Tensor]:
    """Homes of the states among ``vertices`` by INPUT id. Raises ExecutionError naming an input whose home is missing,
    is no such range of host memory, or shares bytes with another."""
    homes = {v.id: _home(v, given.get(v.id), describer.input(v.id)) for v in vertices if changes_over_steps(v)}
    extents = sorted((home.data_ptr(), home.numel(), state) for state, home in homes.items() if home.numel())
    for (begin, nbytes, first), (then, _, second) in pairwise(extents):
        if then < begin + nbytes:
            pair = f"{describer.input(first)} and {describer.input(second)}"
            raise ExecutionError(f"the homes of {pair} share memory; each state needs a home of its own")
    return homes


def _home(vertex: Vertex, home: torch.Tensor | None, name: str) -> torch.Tensor:
    nbytes = vertex.sizes[0]
    if home is None:
        raise ExecutionError(f"state {name} needs a home of {nbytes} host bytes, none was given in states")
    if home.dtype is not torch.uint8 or home.dim() != 1 or not home.is_contiguous() or not home.is_cpu:
        raise ExecutionError(
            f"the home of state {name} is {str(home.dtype).removeprefix('torch.')}{list(home.shape)} with strides "
            f"{list(home.stride())} on {home.device}; it must be a contiguous 1-d uint8 tensor on the cpu, such as "
            "bytes_of() makes of a tensor there"
        )
    if home.numel() != nbytes:
        raise ExecutionError(f"the home of state {name} has {home.numel()} bytes where the plan has {nbytes}")
    return home


class StateHomes:
    """The states of one executor. ``homes``: 1-d uint8 host tensor by INPUT id, kept alive; ``arenas`` by device id.
    ``cyclic``: a step ends with every resident in its place."""

    def __init__(
        self,
        planned: PlannedStates,
        homes: Mapping[int, torch.Tensor],
        arenas: Mapping[int, torch.Tensor],
        describer: Describer,
        *,
        cyclic: bool,
    ) -> None:
        self.planned, self._homes, self._describer = planned, homes, describer
        self._addresses = [home.data_ptr() for home in homes.values()]
        self._copies = {
            state: arenas[slot.space][slot.offset : slot.offset + homes[state].numel()]
            for state, slot in planned.unstored.items()
        }
        self._memory = [arena.untyped_storage().data_ptr() for arena in arenas.values() if arena.numel()]
        self._torn = self._interrupted = False
        self.newer = False
        """Whether residents are newer than their homes."""
        self.loads_each_step = not cyclic and bool(planned.changed())
        """Whether residents are to be loaded again before each step."""

    def before_step(self) -> None:
        """Raises ExecutionError where a step would start from, or destroy, states that are not whole."""
        if _HOLDERS:
            self._check_arenas()
        if not self._homes:
            return
        if self._torn:
            raise StatesTorn(
                f"the step before ended early, when it had begun to change {self._names(self.planned.changed())}: "
                "some updates of that step are done and others are not. Put right values into the homes of all "
                "states, from a checkpoint, and call restore_states(), or make a new executor"
            )
        addresses = zip(self._homes.items(), self._addresses, strict=True)
        if moved := [state for (state, home), address in addresses if home.data_ptr() != address]:
            raise ExecutionError(
                f"the memory of the home of {self._names(moved)} was freed or moved: make a new executor"
            )
        if self._interrupted:
            # The engine will load all residents, and nothing was written over them.
            self.store()
            self._interrupted = False

    def after_step(self) -> None:
        """A step has run to its end."""
        if self._copies and not self.newer:
            self.newer = True
            _HOLDERS.update(dict.fromkeys(self._memory, self))

    def after_early_end(self, changes: int) -> None:
        """A step has ended early, or was dropped by its caller; ``changes``: vertices launched that change a state.
        Without any, each resident that is newer than its home is still in its place: memory edges let nothing over it
        before it was changed or stored."""
        if changes:
            self._torn = True
            self._forget_newer()
        else:
            self._interrupted = True

    def require_stored(self) -> None:
        """Raises ExecutionError while residents are newer than their homes."""
        if self.newer:
            raise ExecutionError(
                f"{self._names(self._copies)} on the device are newer than their homes, and would be lost: call "
                "store_states() first, or restore_states() to go on with what the homes hold"
            )

    def store(self) -> None:
        """Write residents that are newer than their homes there. Raises StatesTorn after a torn step."""
        if self._torn:
            raise StatesTorn(
                f"the step before ended early, when it had begun to change {self._names(self.planned.changed())}: "
                "what the device has of them is of no single step. Load a checkpoint and call restore_states()"
            )
        if not self.newer:
            return
        # Homes and arenas may be of either kind of tensor; here both can be written to.
        with torch.inference_mode():
            for state, copy in self._copies.items():
                self._homes[state].copy_(copy)
        self._forget_newer()

    def write(self, state: int, copy: torch.Tensor) -> None:
        """Write ``copy``, in an arena, to the home of ``state``."""
        with torch.inference_mode():
            self._homes[state].copy_(copy)

    def store_if_whole(self) -> None:
        """As ``store``; does nothing after a torn step."""
        if not self._torn:
            self.store()

    def restore(self) -> None:
        """The homes hold right values; the device's copies are dropped."""
        self._torn = self._interrupted = False
        self._forget_newer()

    def view(self, state: int, spec: TensorSpec) -> torch.Tensor:
        """The home as a tensor laid out as ``spec``."""
        home, dtype = self._homes[state], getattr(torch, spec.dtype)
        if home.storage_offset() % dtype.itemsize:
            raise ExecutionError(
                f"the home of {self._names([state])} begins at byte {home.storage_offset()} of its storage, which is "
                f"no multiple of the {dtype.itemsize} bytes of {spec.dtype}"
            )
        offset = home.storage_offset() // dtype.itemsize + spec.offset
        return torch.empty(0, dtype=dtype).set_(home.untyped_storage(), offset, spec.shape, spec.stride)

    def _forget_newer(self) -> None:
        self.newer = False
        for memory in self._memory:
            if _HOLDERS.get(memory) is self:
                del _HOLDERS[memory]

    def _check_arenas(self) -> None:
        for memory in self._memory:
            holder = _HOLDERS.get(memory)
            if holder is not None and holder is not self:
                raise ExecutionError(
                    f"another executor has {holder._names(holder._copies)} in this arena, newer than their homes: "
                    "call its store_states() before this step"
                )

    def _names(self, states: Iterable[int]) -> str:
        names = [self._describer.input(state) for state in states]
        return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
