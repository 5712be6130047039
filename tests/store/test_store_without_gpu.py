"""A store that is to be in a GPU's memory, on a machine that has none: refused before it listens, with what to do."""

from __future__ import annotations

import ctypes

import pytest

from disco_accel.cli.main import main
from disco_accel.errors import ConfigError
from disco_accel.native import cuda_driver
from disco_accel.store.cuda_tier import CudaTier


def no_library(name: str) -> ctypes.CDLL:
    raise OSError(f"{name}: cannot open shared object file")


class OldLibrary:
    """Of a driver that has none of the functions."""

    def __init__(self, name: str) -> None:
        """Whatever it is called."""


@pytest.mark.parametrize(
    ("library", "says"), [(no_library, "no driver here.*--device-kind host"), (OldLibrary, "too old.*update it")]
)
def test_no_driver(library: object, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", library)
    cuda_driver._driver.cache_clear()
    with pytest.raises(ConfigError, match=f"--device-kind cuda: CUDA: .*{says}"):
        CudaTier(1 << 20)
    cuda_driver._driver.cache_clear()


def test_a_rate_of_the_host_devices_link_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "serve", "--device-kind", "cuda", "--link-bandwidth", "1GB/s"]) != 0
    assert "--link-bandwidth: is of the host device" in capsys.readouterr().err
