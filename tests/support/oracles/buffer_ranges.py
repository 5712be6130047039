"""The demands of the judge of version-2 plans of buffers that hold a range of a value's bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from disco_accel.errors import VerifyError
from disco_accel.graph.schema2 import Buffer, Planned, Version, Vertex, Work
from disco_accel.graph.traits import Access, Lifetime
from disco_accel.verify.occupants import Occupants
from tests.support.oracles.judged_buffers import JudgedBuffers, Memory


def check_range(judged: JudgedBuffers, buffer: Buffer) -> None:
    """A range is of the bytes of a value that never changes, or of what a copy brings back, on a device."""
    value = judged.value(buffer)
    begin, end = buffer.range(value)
    if not 0 <= begin < end <= value.bytes:
        raise VerifyError(f"buffer {buffer.id}: bytes [{begin}, {end}) are not among the {value.bytes} of its value")
    there = buffer.id not in judged.writer
    if there and (value.traits.lifetime is not Lifetime.STEPS or value.traits.renewed):
        raise VerifyError(f"buffer {buffer.id}: bytes [{begin}, {end}) of value {value.id} are brought alone")
    changes = value.traits.lifetime is Lifetime.STEPS and value.traits.access is not Access.READ
    if (
        changes
        or buffer.offset is None
        or buffer.space != value.space
        or judged.writer.get(buffer.id) in judged.vertices
    ):
        raise VerifyError(f"buffer {buffer.id}: value {value.id} is not in ranges there")


def check_all_bytes(judged: JudgedBuffers, planned: Planned, vertex: Vertex, reads: Sequence[Buffer]) -> None:
    """A kernel reads ranges that lie side by side and are all of a version; the further ones stand behind its reads."""
    name = judged.name(planned.id)
    ranges: dict[Version, dict[int, Buffer]] = defaultdict(dict)
    for position, buffer in enumerate(reads):
        if position >= len(vertex.reads) and (buffer.begin == 0 or vertex.work is not Work.KERNEL):
            raise VerifyError(f"{name}: reads buffer {buffer.id} too many")
        if position < len(vertex.reads) and buffer.begin:
            raise VerifyError(f"{name}: reads buffer {buffer.id}, whose bytes are not the first of its value")
        other = ranges[buffer.version].setdefault(buffer.begin, buffer)
        if other.id != buffer.id and not (judged.is_whole(other) and judged.is_whole(buffer)):
            raise VerifyError(f"{name}: buffers {other.id} and {buffer.id} hold the same bytes")
    for version, buffers in ranges.items():
        end = 0
        for begin, buffer in sorted(buffers.items()):
            if begin != end or judged.place(buffer) != judged.place(buffers[0]):
                raise VerifyError(f"{name}: the ranges of version {list(version)} do not lie side by side")
            end = buffer.range(judged.value(buffer))[1]
        if end != judged.graph.value[version[0]].bytes:
            raise VerifyError(f"{name}: reads version {list(version)} up to byte {end} alone")


def check_ranges_back(judged: JudgedBuffers, memories: Mapping[Memory, Occupants[int]]) -> None:
    """What is on the device in ranges when a step starts is there again, in whatever ranges, when it ends."""
    for buffer in judged.plan.buffers:
        memory = judged.memory(buffer)
        lasts = buffer.id not in judged.writer and judged.value(buffer).traits.lifetime is Lifetime.STEPS
        if not judged.plan.cyclic or not lasts or buffer.offset is None or memory is None:
            continue
        if judged.graph.last_version[buffer.version[0]]:
            continue
        for number in memories[memory].at(*judged.extent(buffer)):
            holder = judged.buffers[number]
            if holder.version != buffer.version or judged.place(holder) != judged.place(buffer):
                raise VerifyError(f"value {buffer.version[0]} is resident but not back in its place when the step ends")
