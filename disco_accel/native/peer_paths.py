"""How bytes get from one GPU to another, and what the user is told of it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from itertools import permutations

import torch

from disco_accel.native.engine_numbers import PeerPath
from disco_accel.native.extension import load_extension

logger = logging.getLogger(__name__)


@functools.cache
def peer_path(source: torch.device, target: torch.device) -> PeerPath:
    """Tried at the first call for a pair of GPUs in this process."""
    load_extension()
    return PeerPath(torch.ops.disco_accel.peer_path(str(source), str(target)))


def all_direct(devices: Sequence[torch.device]) -> bool:
    """Whether copies between any two of ``devices`` go straight."""
    pairs = permutations(dict.fromkeys(devices), 2)
    return all(peer_path(source, target) is PeerPath.DIRECT for source, target in pairs)


def tell_of_peer_paths(devices: Sequence[torch.device]) -> None:
    """Log, once for a pair of GPUs, that a driver changes bytes on the way or that copies go through host memory."""
    for source, target in permutations(dict.fromkeys(devices), 2):
        _tell(source, target)


@functools.cache
def _tell(source: torch.device, target: torch.device) -> None:
    path = peer_path(source, target)
    if path is PeerPath.WRONG_BYTES:
        logger.warning(
            "other bytes arrive at %s than a copy straight from %s has sent, so copies between them go through host "
            "memory; the driver or the machine's IOMMU is to blame, and other programs may compute with wrong bytes",
            target,
            source,
        )
    elif path is PeerPath.NO_ACCESS:
        logger.info("%s has no access to the memory of %s: copies between them go through host memory", source, target)
