"""The judges of a plan (no code of the planner's): a static one, and an adversary that runs it in the worst order."""
