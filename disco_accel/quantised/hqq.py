"""hqq: layers with a plain packed weight, whose scales are in their table ``meta``."""

from __future__ import annotations

from disco_accel.quantised.library import QuantLibrary

HQQ = QuantLibrary(name="hqq", package="hqq", state_tables={"HQQLinear": "meta"})
