"""The bytes of a piece of a copy, by what the engine runs on."""

from __future__ import annotations

import pytest

from disco_accel.errors import ConfigError
from disco_accel.execute.engine_options import EngineOptions, HostLink, copy_piece, engine_settings
from disco_accel.native.cuda_backend import GPU_COPY_PIECE


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:3"])
def test_a_gpu_has_its_own_however_it_is_named(device: str) -> None:
    assert copy_piece(EngineOptions(device=device)) == GPU_COPY_PIECE


def test_a_throttled_link_has_a_milliseconds_worth_and_another_copies_as_a_whole() -> None:
    assert copy_piece(EngineOptions(link_bandwidth=5e8)) == 500_000
    assert copy_piece(EngineOptions(links=(HostLink(), HostLink(1e9), HostLink(2e8)))) == 200_000
    assert copy_piece(EngineOptions(link_bandwidth=1.0)) == 1
    assert copy_piece(EngineOptions()) == copy_piece(EngineOptions(links=(HostLink(),))) == 0


def test_bytes_that_are_given_count() -> None:
    for piece in (0, 7):
        assert engine_settings(EngineOptions(device="cuda", copy_piece=piece))["copy_piece"] == piece
    with pytest.raises(ConfigError, match="copy_piece is -1"):
        engine_settings(EngineOptions(copy_piece=-1))
