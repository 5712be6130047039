"""The order in which forwards read tensors, learned from one forward for the next of the same kind."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Sequence

import torch

_MOST_KINDS = 64
_NEAR = 64
"""Reads that a forward may leave out without being taken for one that has gone elsewhere."""


class ReadOrder:
    """One forward at a time is followed. Reads between its end and the next one's begin belong to it: a backward reads
    weights again."""

    def __init__(self, first: Iterable[torch.Tensor]) -> None:
        """``first``: the order that a forward of a kind is expected to have before one has run."""
        self._first = [weakref.ref(tensor) for tensor in first]
        self._learned: dict[Hashable, list[weakref.ref[torch.Tensor]]] = {}
        self._kind: Hashable = None
        self._whole = False
        self._read: list[weakref.ref[torch.Tensor]] = []
        """By the forward that is followed."""
        self._expected: Sequence[weakref.ref[torch.Tensor]] = self._first
        self._places: dict[int, list[int]] = {}
        """Places in ``_expected``, ascending, by the identity of a tensor."""
        self._next = self._following = 0

    def begin(self, kind: Hashable) -> None:
        """A forward of this ``kind`` begins."""
        if self._whole:
            if self._kind not in self._learned and len(self._learned) >= _MOST_KINDS:
                self._learned.clear()
            self._learned[self._kind] = self._read
        self._kind, self._whole, self._read = kind, False, []
        self._next = self._following = 0
        expected = self._learned.get(kind, self._first)
        if expected is not self._expected or not self._places:
            self._expected, self._places = expected, {}
            for place, reference in enumerate(expected):
                tensor = reference()
                if tensor is not None:
                    self._places.setdefault(id(tensor), []).append(place)

    def end(self) -> None:
        """It has come to its end; one that does not teaches nothing."""
        self._whole = True

    def read(self, tensor: torch.Tensor) -> None:
        """It reads ``tensor``, which may be out of the expected order."""
        self._read.append(weakref.ref(tensor))
        places = self._places.get(id(tensor), ())
        if not places:
            return
        place = places[min(bisect_left(places, self._next), len(places) - 1)]
        # A single read elsewhere, as by a hook, leads nowhere; two in a row do.
        if self._next <= place < self._next + _NEAR or place == self._following:
            self._next = place + 1
        self._following = place + 1

    def ahead(self, most: int) -> Iterator[torch.Tensor]:
        """The tensors of the next reads by expectation, in order; of ``most`` so many reads."""
        for place in range(self._next, min(self._next + most, len(self._expected))):
            tensor = self._expected[place]()
            if tensor is not None:
                yield tensor

    def tensors(self) -> list[torch.Tensor]:
        """Each tensor that was read, once, in the order of first reads."""
        return _each(self._read)

    def expected(self) -> list[torch.Tensor]:
        """Each tensor of the expected order, once."""
        return _each(self._expected)


def _each(references: Iterable[weakref.ref[torch.Tensor]]) -> list[torch.Tensor]:
    alive = (reference() for reference in references)
    return list({id(tensor): tensor for tensor in alive if tensor is not None}.values())
