"""The distance between a plan and the bound of its graph, as a sum (docs/why.md)."""
