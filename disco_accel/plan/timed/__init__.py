"""The timed planner: when each copy runs is decided first, addresses follow."""
