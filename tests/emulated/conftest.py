"""These tests run under ``make emulated``; elsewhere they are not collected, and the whole run's summary says so."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("EMULATED_CUDA") == "1" else ["test_*.py"]
