"""BUILDMEMGRAPH, the planner of the paper (``README.md`` has figure beside code), and the searches around it."""
