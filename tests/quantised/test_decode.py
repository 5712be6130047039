"""Tokens of a mixture with packed experts: those that the router has chosen are loaded packed, and alone."""

from __future__ import annotations

from tests.quantised.children import lines_of


def test_packed_experts_without_tokens_are_neither_loaded_nor_unpacked() -> None:
    """Two rows choose two experts each, of 64. Scales may be packed too: then all of those are loaded."""
    results = lines_of("decode.py", "10MiB")
    assert [result["nested"] for result in results] == [False, True]
    for result in results:
        assert result["equal"] and not result["fallbacks"] and result["unplanned"] == 0, result
        assert 0 < result["loaded"] < 0.1 * result["packed"], result
        assert result["unpacked"] == [4] * 4, result
