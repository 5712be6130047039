"""``python -m benchmarks.prefill``."""

from benchmarks.prefill.suite import main

if __name__ == "__main__":
    raise SystemExit(main())
