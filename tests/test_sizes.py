"""Sizes that people write."""

from __future__ import annotations

import pytest

from disco_accel.errors import ConfigError
from disco_accel.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("12GiB", 12 << 30), ("1.5 GiB", 3 << 29), ("4096", 4096), (7, 7), ("2mb", 2_000_000), ("3k", 3072), (" 1B ", 1)],
)
def test_sizes_mean_bytes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "0", "1e9", "12 parsecs", "1..5G", "٣GiB", True, 1.5, None, "9" * 20]
)
def test_everything_else_is_a_config_error(text: object) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 1023, 1024, 5 << 20, 12 << 30, 1 << 41])
def test_whole_sizes_survive_a_round_trip(size: int) -> None:
    assert parse_size(format_size(size)) == size


def test_other_sizes_are_rounded_for_reading() -> None:
    assert format_size(3 << 29) == "1.50GiB"
