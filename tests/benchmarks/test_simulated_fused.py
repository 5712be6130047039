"""The table of fused kernels in simulation."""

from __future__ import annotations

import pytest

from benchmarks.simulated import fused


@pytest.mark.parametrize("more", [[], ["--no-checkpointing"]])
def test_a_small_step_has_fewer_kernels_and_bytes_with_runs(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line for each device; joined kernels are fewer, move less and take no longer."""
    assert fused.main(["--shape", "tiny", "--batch", "2", "--tokens", "16", *more]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == ["RTX 4090", "H200"]
    for line in lines:
        kernels, joined, _, _, seconds = line.strip("| ").split(" | ")[1:]
        assert int(joined) < int(kernels)
        assert float(seconds) <= 1
