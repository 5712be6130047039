"""``python -m benchmarks.devices``."""

from benchmarks.devices.suite import main

if __name__ == "__main__":
    raise SystemExit(main())
