"""The GPUs that seconds are estimated for: rates below their peaks, each with a source or marked as without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from disco_accel.errors import ConfigError
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.native.backend import backend_of_kind
from disco_accel.simulate import gpus
from disco_accel.simulate.gpus import gpu_like, gpu_named, gpu_names

FIGURES = ("half", "single", "bandwidth", "link")


def test_every_gpu_has_rates_below_its_peaks_and_a_source() -> None:
    rows = json.loads(Path(gpus.__file__).with_name("gpus.json").read_text())["gpus"]
    assert tuple(rows) == gpu_names() and len(rows) == 11
    for name, row in rows.items():
        gpu = gpu_named(name)
        assert 0.5 < gpu.speed.half / row["half"] < 1 and 0.5 < gpu.speed.single / row["single"] < 1
        assert 0.7 < gpu.speed.memory / row["bandwidth"] < 1
        assert gpu.source and set(gpu.unverified) <= set(FIGURES)
        assert gpu.speed.machine.link(TO_DEVICE) == gpu.speed.machine.link(TO_HOST)
        assert 12 << 30 <= gpu.memory <= 180 << 30 and row["label"] in gpu.speed.name


def test_the_device_of_estimates_without_a_name_is_one_of_them() -> None:
    """There is one A100: that of ``Backend.speed``."""
    assert gpu_named("a100-40g").speed == backend_of_kind("cuda").speed
    assert backend_of_kind("cuda").speed.half == 1.8e14


def test_a_wrong_name_names_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError, match=r"--gpu: 'H1000' is not known; did you mean h100\? give one of rtx3060"):
        gpu_named("H1000")


@pytest.mark.parametrize(
    ("hardware", "gib", "name"),
    [
        ("NVIDIA GeForce RTX 4090", 23.5, "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16, None),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 15.7, "rtx4070ti-16g"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80g"),
        ("NVIDIA L4", 22.3, "l4"),
        ("NVIDIA L40S", 44.5, None),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
        ("NVIDIA H200", 139.8, "h200"),
    ],
)
def test_a_driver_s_name_is_that_of_a_row_or_of_none(hardware: str, gib: float, name: str | None) -> None:
    found = gpu_like(hardware, int(gib * (1 << 30)))
    assert (found and found.name) == name
