"""``python -m benchmarks.gpu``."""

from benchmarks.gpu.suite import main

if __name__ == "__main__":
    raise SystemExit(main())
