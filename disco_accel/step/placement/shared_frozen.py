"""``share_weights``: the frozen weights of a model lie in memory that all processes of the user map."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from disco_accel.native.file_arena import FileArena
from disco_accel.native.host_memory import HostMemory
from disco_accel.native.rendezvous import NotSharedError
from disco_accel.native.shared_copies import key_of, shared_copy
from disco_accel.observe.log_to_stderr import say, say_everywhere
from disco_accel.sizes import format_size

Move = Callable[[torch.Tensor, torch.Tensor], None]
"""Gives a weight other memory with the same bytes."""


class FrozenSharing:
    """Puts frozen weights into shared memory, and says once what came of it."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        """``folder``: where processes find each other; ``warn`` shows a line once."""
        self._folder, self._warn = folder, warn
        self._told: weakref.WeakSet[FileArena] = weakref.WeakSet()
        """Arenas of which it is known that this process has written to them."""

    def gather(self, tensors: Sequence[torch.Tensor], move: Move) -> FileArena | None:
        """Move all of ``tensors`` into one shared copy, one at a time: each old one is given up at once. None, and
        nothing moved, where they cannot be shared.

        Raises:
            ConfigError: the folder is another user's, a link, or open to others.
        """
        try:
            key, room = key_of(tensors), HostMemory.room_for(tensors)
            if room == 0:
                return None

            def unchanged(placed: list[torch.Tensor]) -> bool:
                return key_of(placed) == key

            with shared_copy(self._folder, key, room, unchanged, say_everywhere, self._warn) as copy:
                for tensor in tensors:
                    move(tensor, copy.put(tensor.data))
        except NotSharedError as error:
            self._warn(f"share_weights: this process keeps frozen weights of its own: {error}")
            return None
        say(f"share_weights: {format_size(room)} of frozen weights, shared: {copy.origin}")
        return copy.arena

    def tell_written(self, arena: FileArena, names: Sequence[str]) -> None:
        """Say once that this process has written to weights of these ``names`` in ``arena``."""
        if not names or arena in self._told:
            return
        self._told.add(arena)
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        self._warn(
            f"share_weights: this process has written to {names[0]}{others}, which it shares: from now on it has pages "
            "of its own there, and no other process sees what it wrote"
        )
