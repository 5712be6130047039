"""Addresses of a plan's values in the memory that the engine was given: none is outside of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from disco_accel.errors import ExecutionError
from disco_accel.graph.memgraph import Slot
from disco_accel.graph.taskgraph import Ref, Vertex
from disco_accel.native.host_memory import ALIGNMENT


@dataclass(frozen=True, slots=True)
class Memory:
    """The arenas that addresses are relative to, by device id; by vertex id the host bytes of inputs that no kernel
    changes (``clean``) and the homes of states, 1-d uint8. Kernels of host devices use these two where they are."""

    devices: Mapping[int, torch.Tensor]
    host: torch.Tensor
    clean: Mapping[int, torch.Tensor]
    states: Mapping[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of a plan's values in its ``memory``, each checked to lie inside its slot and its arena."""

    slots: Mapping[Ref, Slot]
    vertices: Mapping[int, Vertex]
    memory: Memory

    def of(self, ref: Ref, nbytes: int, offset: int = 0) -> int:
        """The address of ``nbytes`` bytes from ``offset`` on in the slot of ``ref``, all of them inside slot and arena.
        No plan gets an address outside the memory that the engine was given."""
        slot, size = self.slots.get(ref), self.vertices[ref[0]].sizes[ref[1]]
        what = f"value {ref[1]} of vertex {ref[0]}"
        if slot is None:
            raise ExecutionError(f"{what} has no address in the plan")
        if offset < 0 or offset + nbytes > size:
            raise ExecutionError(f"{what}: bytes {offset} to {offset + nbytes} are used of a slot of {size}")
        arena = self.memory.devices.get(slot.space)
        if arena is None:
            raise ExecutionError(f"{what} lies on device {slot.space}, of which there is no memory")
        return _within(arena, slot.offset, size, what, f"device {slot.space}") + offset

    def on_host(self, offload: int, nbytes: int) -> int:
        slot = self.slots.get((offload, 0))
        if slot is None:
            raise ExecutionError(f"offload {offload} has no place in the host arena")
        return _within(self.memory.host, slot.offset, nbytes, f"offload {offload}", "the host")

    def clean_bytes(self, vertex: Vertex) -> int:
        """The host's address of the bytes of a clean input that a reload copies or a resident range holds."""
        source, nbytes = vertex.inputs[0][0], vertex.sizes[0]
        held, what = self.memory.clean.get(source), vertex.op or vertex.kind.name.lower()
        if held is None:
            raise ExecutionError(f"{what} {vertex.id} reads vertex {source}, which has no host bytes")
        if vertex.begin < 0 or vertex.begin + nbytes > held.numel() * held.element_size():
            raise ExecutionError(
                f"{what} {vertex.id} reads bytes {vertex.begin} to {vertex.begin + nbytes} of clean input {source}, "
                "which has fewer"
            )
        return held.data_ptr() + vertex.begin

    def home(self, state: int, user: Vertex) -> int:
        """The address of a state's home, all of which ``user`` reads or writes."""
        home = self.memory.states[state]
        if user.sizes[0] != home.numel():
            raise ExecutionError(
                f"vertex {user.id} copies {user.sizes[0]} bytes of state {state}, which has {home.numel()}"
            )
        return home.data_ptr()

    def home_of(self, vertex: int) -> torch.Tensor:
        """Where the host has an INPUT."""
        home = self.memory.states.get(vertex)
        home = self.memory.clean.get(vertex) if home is None else home
        if home is None or home.numel() != self.vertices[vertex].sizes[0]:
            raise ExecutionError(f"input {vertex} is used where the host has it, but has no host bytes of its size")
        return home


def _within(arena: torch.Tensor, offset: int, nbytes: int, what: str, where: str) -> int:
    """The address of ``nbytes`` bytes at ``offset`` of ``arena``. Raises ExecutionError unless all are inside."""
    if offset < 0 or nbytes < 0 or offset + nbytes > arena.numel():
        raise ExecutionError(
            f"{what}: bytes {offset} to {offset + nbytes} are outside the {arena.numel()} bytes of {where}'s arena"
        )
    if offset % ALIGNMENT:
        raise ExecutionError(f"{what}: offset {offset} in {where}'s arena is not a multiple of {ALIGNMENT}")
    return arena.data_ptr() + offset
