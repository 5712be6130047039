"""An adapter is merged into a base of packed weights as into the same base dequantised, byte for byte."""

from __future__ import annotations

from pathlib import Path

from tests.quantised.children import lines_of


def test_merges_into_packed_bases_have_the_bytes_of_pefts(tmp_path: Path) -> None:
    """Four forms in two data types, within a limit; torchao's is refused by name."""
    *merged, refused = lines_of("merge_packed.py", str(tmp_path))
    assert len(merged) == 8 and [line for line in merged if line["different"]] == []
    assert "weights packed by torchao are not dequantised here" in refused["refused"]
