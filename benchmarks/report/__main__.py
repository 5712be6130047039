"""``python -m benchmarks.report``."""

from benchmarks.report.pages import main

if __name__ == "__main__":
    raise SystemExit(main())
