"""``python -m benchmarks.planner``."""

from benchmarks.planner.table import main

if __name__ == "__main__":
    raise SystemExit(main())
