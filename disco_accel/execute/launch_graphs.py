"""CUDA graphs that an engine launches, each in the place of several kernels."""

from __future__ import annotations

from typing import Any

_FIGURES = ("graphs", "kernels", "bytes", "refused")


def launch_graphs_of(figures: tuple[int, int, int, str]) -> dict[str, Any]:
    """The number of an engine's ``graphs``, the ``kernels`` in them, and the ``bytes`` that they take on the GPUs.

    ``refused``: why the first kernel that could not be recorded was left out, or why there are no graphs; "": none was.
    """
    return dict(zip(_FIGURES, figures, strict=True))


def in_words(figures: dict[str, Any]) -> str:
    """A clause for a line about the step; "" where there is nothing to say."""
    told = f"{figures['kernels']} kernels are launched as {figures['graphs']} graphs" if figures["graphs"] else ""
    left = f"launch graphs left some out: {figures['refused']}" if figures["refused"] else ""
    return "; ".join(filter(None, (told, left)))
