"""The weights of a checkpoint in memory that processes share: found by what is in its files, which are read once."""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import ExitStack
from pathlib import Path

import torch

from disco_accel.integrate.hf.safetensors_file import StoredTensor, conversion_buffer, opened, read_into
from disco_accel.native.file_arena import FileArena
from disco_accel.native.file_keys import key_of_file
from disco_accel.native.host_memory import HostMemory
from disco_accel.native.rendezvous import Rendezvous
from disco_accel.native.shared_copies import layout_of, shared_copy
from disco_accel.observe.log_to_stderr import say_everywhere
from disco_accel.sizes import format_size

logger = logging.getLogger("disco_accel")


def read_shared(
    sources: list[StoredTensor], current: list[torch.Tensor], folder: Path
) -> tuple[FileArena, list[torch.Tensor]]:
    """A tensor for each of ``current``, laid out alike and contiguous, with the bytes of the same of ``sources``.

    ``folder``: where processes meet. Read from the files, unless another process holds a copy of them.

    Raises:
        ConfigError: a file ends too early; the folder is another user's, a link, or open to others.
        NotSharedError: nothing can be shared here.
    """
    meeting = Rendezvous(folder)
    files = sorted({source.file for source in sources})
    keys = {file: key_of_file(file, meeting, say_everywhere) for file in files}
    rows = [[keys[s.file], s.offset, s.nbytes, str(s.dtype)] for s in sources]
    text = json.dumps(["checkpoint", layout_of(current), rows])
    key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    # Along the files; the same in every process, because the key has it.
    order = sorted(range(len(sources)), key=lambda i: rows[i][:2])
    placed, room = list(current), HostMemory.room_for(current)

    def unchanged(_: list[torch.Tensor]) -> bool:
        return all(key_of_file(file, meeting, _say) == keys[file] for file in files)

    with ExitStack() as open_files, shared_copy(folder, key, room, unchanged, say_everywhere, _warn) as copy:
        descriptors = {file: open_files.enter_context(opened(file)) for file in files} if copy.is_new else {}
        buffer = conversion_buffer()
        for i in order:
            tensor = current[i]
            if copy.is_new:
                tensor = torch.empty(tensor.shape, dtype=tensor.dtype)
                read_into(descriptors[sources[i].file], sources[i], tensor, buffer)
            placed[i] = copy.put(tensor)
    _say(f"share_weights: {format_size(room)} of the checkpoint, shared: {copy.origin}")
    return copy.arena, placed


def _say(text: str) -> None:
    logger.info("%s", text)


def _warn(text: str) -> None:
    logger.warning("%s", text)
