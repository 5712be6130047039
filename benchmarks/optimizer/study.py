"""A published study's machine, model and measured step, and what follows from its figures.

Source: Maurya et al., "Breaking the Memory Wall: A Study of I/O Patterns and GPU Memory Utilization for Hybrid CPU-GPU
Offloaded Optimizers" (arXiv 2406.10728): DeepSpeed's ZeRO-Offload on one H100. No device ran anything here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.common.shapes import PRESETS, Shape, frozen_bytes
from disco_accel.graph.spaces import BETWEEN_DEVICES, TO_DEVICE, TO_HOST
from disco_accel.simulate.machine import Link, Machine

WEIGHT, GRADIENT, STATE = 2, 2, 12
"""Bytes a parameter: bf16 weight and gradient; fp32 weight and two fp32 moments of Adam."""


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder and the batch of one micro-batch. ``shape``: as in ``benchmarks.common.shapes``.

    Assumed: of the models of 13 billion parameters, Llama 2's shape. Its checkpoints are one hidden state a layer.
    """

    shape: Shape = field(default_factory=lambda: PRESETS["13b"])
    batch: int = 2
    length: int = 2048
    accumulation: int = 2

    @property
    def tokens(self) -> int:
        """Of one micro-batch."""
        return self.batch * self.length

    @property
    def hidden(self) -> int:
        return self.shape["hidden_size"]

    @property
    def layers(self) -> int:
        return self.shape["num_hidden_layers"]

    @property
    def parameters(self) -> int:
        return frozen_bytes(self.shape, 1)

    @property
    def table(self) -> int:
        """Parameters of the embedding, and as many of the output layer."""
        return self.shape["vocab_size"] * self.hidden

    @property
    def layer(self) -> int:
        """Parameters of one layer; the last norm is counted with the output layer."""
        return (self.parameters - 2 * self.table - self.hidden) // self.layers


@dataclass(frozen=True, slots=True)
class Measured:
    """The study's row for one GPU, in seconds. ``forward``, ``backward`` (activations recomputed): of a micro-batch;
    ``flushing_backward``: of the last one, with the gradients' way to the host; ``teraflops``: 6 x parameters x tokens
    over the whole step."""

    forward: float = 0.31
    backward: float = 1.03
    flushing_backward: float = 11.2
    update: float = 4.6
    step: float = 17.1
    teraflops: float = 18.9


@dataclass(frozen=True, slots=True)
class StudyMachine:
    """H100 with 80 GB behind PCIe 5. Rates in bytes/s, or parameters/s of Adam on the processors.

    ``memory``: assumed: 4 GiB of the device are the driver's and the libraries'. ``device_memory_rate``: assumed: eight
    tenths of the data sheet's, for updates on the GPU, which read and write 30 B a parameter. ``latency``: a copy's.
    """

    memory: int = 76 << 30
    pinned: float = 55e9
    adam: float = 4.5e9
    adam_with_copies: float = 2.8e9
    device_memory_rate: float = 0.8 * 3.35e12
    latency: float = 1e-5

    @property
    def copy_back(self) -> float:
        """Rate of the blocking copies of updated weights, bytes/s: what makes 4.5 G parameters/s into 2.8."""
        return WEIGHT / (1 / self.adam_with_copies - 1 / self.adam)

    def flush(self, model: Model, measured: Measured) -> float:
        """Rate of the blocking gradient flush to pageable memory, bytes/s: fitted, what the slower backward leaves."""
        return GRADIENT * model.parameters / (measured.flushing_backward - measured.backward)

    def host_seconds(self, parameters: int) -> float:
        """Of an update on the processors."""
        return parameters / self.adam

    def device_seconds(self, parameters: int) -> float:
        """Of an update on the GPU, its values being there: weight, state and gradient read, the first two written."""
        return parameters * (2 * (WEIGHT + STATE) + GRADIENT) / self.device_memory_rate

    def pinned_links(self) -> Machine:
        """Both directions at once, at the rate of pinned memory. What reaches the host is a copy like any other."""
        link = Link(self.pinned, self.latency)
        return Machine(links={TO_DEVICE: link, TO_HOST: link, BETWEEN_DEVICES: link})

    def blocking_links(self, model: Model, measured: Measured) -> Machine:
        """The rates that the study's own schedule gets."""
        down = Link(self.flush(model, measured), self.latency)
        return Machine(links={TO_DEVICE: Link(self.copy_back, self.latency), TO_HOST: down, BETWEEN_DEVICES: down})


@dataclass(frozen=True, slots=True)
class Study:
    """All of it. ``counted_tokens``: assumed: 18.9 TFLOPS in 17.1 s are those of 4096 tokens, one micro-batch, though
    the seconds are those of two (0.31 + 1.03 + 0.31 + 11.2 + 4.6 = 17.45): every row is counted in the same way."""

    model: Model = field(default_factory=Model)
    machine: StudyMachine = field(default_factory=StudyMachine)
    measured: Measured = field(default_factory=Measured)

    @property
    def counted_tokens(self) -> int:
        return self.model.tokens

    def teraflops(self, seconds: float) -> float:
        """As the study counts them, of a step of ``seconds``."""
        return 6 * self.model.parameters * self.counted_tokens / seconds / 1e12


STUDY = Study()
