"""Training steps of large shapes, in simulated time."""
