"""The lower bound of a step, and the distance of a plan from it as a sum (docs/why.md)."""
