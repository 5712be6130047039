"""``bench devices``, at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.devices import suite as devices
from benchmarks.report import pages as report
from disco_accel.cli.main import BENCHMARKS

pytestmark = pytest.mark.usefixtures("forked")


@pytest.mark.long
def test_every_variant_has_eagers_bits_and_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = devices.Job("short", 1 << 14, 0.0, 1 << 20, 1e9)
    variants = (
        *(devices.ONE, devices.Variant(1, micro_batches=4)),
        *(devices.Variant(2, micro_batches=4), devices.Variant(2, "batch")),
    )
    monkeypatch.setattr(devices, "TABLES", {job: variants})
    assert devices.main(["--rounds", "2", "-o", str(tmp_path / "devices.json")]) == 0
    result = json.loads((tmp_path / "devices.json").read_text())
    one, parts, layers, batch = result["rows"]
    assert one["seconds"] == one["ideal"] and batch["ideal"] == one["seconds"] / 2
    assert layers["ideal"] == pytest.approx(parts["seconds"] * 5 / 8)
    title, body = report.TABLES["devices"](result)
    assert title and len(body.splitlines()) == 6 and "devices" in BENCHMARKS
