"""What the engine has made of kernels that follow each other on a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaunchGraphs:
    """CUDA graphs of one plan. ``kernels`` are those that they hold, ``bytes`` what they take of the GPUs' memory, as
    far as that was seen. ``refused``: why the first kernel that could not be recorded was left out, or why there are
    none; "" if nothing was refused."""

    graphs: int
    kernels: int
    bytes: int
    refused: str

    def describe(self) -> str:
        """A clause for a line about the step; "" where there is nothing to say."""
        told = f"{self.kernels} kernels are launched as {self.graphs} graphs" if self.graphs else ""
        return "; ".join(filter(None, (told, f"launch graphs left some out: {self.refused}" if self.refused else "")))
