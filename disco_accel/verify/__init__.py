"""The static judge of a plan, without code of the planner's."""
