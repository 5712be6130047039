"""The steps of the two tables, in the order of their worth, and the GPUs that they are simulated on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from disco_accel.graph.spaces import BETWEEN_DEVICES, TO_DEVICE, TO_HOST
from disco_accel.simulate.roofline import Speed
from disco_accel.simulate.simulator import Link, Machine

A100 = Speed(
    name="A100s with 40 GB",
    half=1.8e14,
    single=1.2e13,
    memory=1.2e12,
    kernel=5e-6,
    machine=Machine(
        links={TO_DEVICE: Link(2.5e10, 1e-5), TO_HOST: Link(2.5e10, 1e-5), BETWEEN_DEVICES: Link(2.0e11, 5e-6)}
    ),
)
"""Six tenths of the peaks of an A100, PCIe 4 x16 for each, NVLink between them."""
P100 = Speed(
    name="P100s with 16 GB",
    half=1.2e13,
    single=6.0e12,
    memory=5.5e11,
    kernel=5e-6,
    machine=Machine(
        links={TO_DEVICE: Link(1.2e10, 1e-5), TO_HOST: Link(1.2e10, 1e-5), BETWEEN_DEVICES: Link(1.0e10, 1e-5)}
    ),
)
"""Six tenths of the peaks of a P100, PCIe 3 x16 for each, by which copies between them go too."""
SPEEDS = {"a100": A100, "p100": P100}
MEMORY = {"a100": 37 << 30, "p100": 15 << 30}
"""Bytes of each device for a step: what a card has beside driver and libraries."""

DEVICES = (1, 2, 4, 8)
LENGTHS = (1024, 4096, 8192, 16384, 32768)
MICRO_BATCHES = 8
"""With ``layers`` on more than one device."""


class Kind(StrEnum):
    """What a step is: LoRA of rank 16 on all projections, activations checkpointed; or a whole prompt of one row."""

    LORA = "lora"
    PROMPT = "prompt"


@dataclass(frozen=True, slots=True)
class Cell:
    """A step to plan. ``tokens`` of each of ``batch`` rows; ``dtype`` of the weights. ``parts``: micro-batches with
    ``layers``, one for each device with ``batch``, 1 with ``tensor``."""

    kind: Kind
    shape: str
    dtype: str
    batch: int
    tokens: int
    gpu: str
    devices: int
    parallel: str
    parts: int = 1

    @property
    def capture(self) -> tuple[Any, ...]:
        """Equal for cells whose step is captured once, before anything is known of devices."""
        ranks = self.devices if self.parallel == "tensor" else 1
        return (self.kind, self.shape, self.dtype, self.batch, self.tokens, self.parts, ranks)

    @property
    def place(self) -> tuple[Any, ...]:
        """Where the tables have it."""
        shape, way = int(self.shape.rstrip("bm")) if self.shape[0].isdecimal() else 0, _WAYS.index(self.parallel)
        return (self.kind, shape, self.shape, self.dtype, self.batch, self.tokens, self.gpu, self.devices, way)


_KEYS = tuple(field.name for field in fields(Cell))
_WAYS = ("layers", "batch", "tensor")


def cell_of(row: dict[str, Any]) -> Cell:
    """The cell that ``row``, of a file of results, is about. Raises KeyError and ValueError."""
    return Cell(**{**{key: row[key] for key in _KEYS}, "kind": Kind(row["kind"])})


def lora_cells(shape: str, dtype: str, gpu: str, batch: int = 8) -> Iterator[Cell]:
    """One device with the whole batch of rows of 1024 tokens, more in each of the ways."""
    step = (Kind.LORA, shape, dtype, batch, 1024, gpu)
    yield Cell(*step, 1, "layers")
    for devices in DEVICES[1:]:
        yield Cell(*step, devices, "layers", MICRO_BATCHES)
        yield Cell(*step, devices, "batch", devices)
        yield Cell(*step, devices, "tensor")


def prompt_cells(shape: str, tokens: int, gpu: str) -> Iterator[Cell]:
    """One device with the whole prompt, more in each of the ways that one row can be shared."""
    step = (Kind.PROMPT, shape, "bfloat16", 1, tokens, gpu)
    yield Cell(*step, 1, "layers")
    for devices in DEVICES[1:]:
        yield Cell(*step, devices, "layers")
        yield Cell(*step, devices, "tensor")


def grid() -> list[Cell]:
    """All cells of both tables: small models first, then the papers' larger batch, then those of 65B on the most
    devices first; neighbours share their capture as far as that order has them side by side."""
    groups: list[list[Cell]] = []
    for shape in ("7b", "13b"):
        groups += [[c for gpu in SPEEDS for c in lora_cells(shape, dtype, gpu)] for dtype in ("float32", "bfloat16")]
        if shape == "7b":
            groups.append([c for c in lora_cells(shape, "float32", "a100", 32) if c.devices == 8])
        groups += [[c for gpu in SPEEDS for c in prompt_cells(shape, tokens, gpu)] for tokens in LENGTHS]
    large = [c for dtype in ("float32", "bfloat16") for gpu in SPEEDS for c in lora_cells("65b", dtype, gpu)]
    large += [c for tokens in LENGTHS for gpu in SPEEDS for c in prompt_cells("65b", tokens, gpu)]
    groups += [[c for c in large if c.devices == devices] for devices in reversed(DEVICES)]
    return [cell for group in groups for cell in by_capture(group)]


def by_capture(cells: Sequence[Cell]) -> list[Cell]:
    """``cells`` with those that share a capture side by side, in the order of the first of each."""
    found: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.capture, []).append(cell)
    return [cell for same in found.values() for cell in same]
