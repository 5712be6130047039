"""``python -m benchmarks.simulated_devices``."""

from benchmarks.simulated_devices.suite import main

if __name__ == "__main__":
    raise SystemExit(main())
