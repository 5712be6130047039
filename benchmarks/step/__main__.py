"""``python -m benchmarks.step``."""

from benchmarks.step.suite import main

if __name__ == "__main__":
    raise SystemExit(main())
